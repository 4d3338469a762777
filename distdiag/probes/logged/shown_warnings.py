"""Warnings whose cause is known, as they are shown."""

from __future__ import annotations

import sys
import warnings
from typing import ClassVar, Final

from distdiag.events.base import CallSite, Frame
from distdiag.events.logged import WARNINGS, Warned
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of, is_own_file
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.user_code import is_user_file

_MOST_TOLD: Final = 64
_LONGEST_TEXT: Final = 500
_HIDING: Final = "torch._logging._internal"
"""The module whose `hide_warnings` puts a function of its own into the place of `showwarning`."""


class ShownWarnings(Probe):
    """Writes down warnings that are shown and not caught; each topic once for each place."""

    name: ClassVar[str] = "shown-warnings"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._told: set[tuple[str, str, int]] = set()
        self._shown_by = vars(warnings).get("_showwarnmsg_impl")

    def _install(self) -> None:
        # C and Python show a warning by this one, after the filters of the program.
        self._patches.wrap(warnings, "_showwarnmsg", self._showing)

    def _showing(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def show(msg: object) -> object:
            if not self.is_off:
                with self.guard:
                    self._note(msg)
            return original(msg)

        return show

    def _note(self, warning: Untyped) -> None:
        text = str(warning.message)
        topic = next((name for name, part in WARNINGS.items() if part in text), "")
        is_caught = vars(warnings).get("_showwarnmsg_impl") is not self._shown_by
        # While it compiles, torch reads attributes of any tensor, and hides what it is warned of.
        is_caught |= getattr(warnings.showwarning, "__module__", "") == _HIDING
        if not topic or is_caught or len(self._told) >= _MOST_TOLD:
            return
        main_script = self.recorder.main_script
        frame = sys._getframe(2)  # of `show` the caller, which may be a line of torch
        if is_own_file(frame.f_code.co_filename, main_script):
            return  # what a probe has asked for
        frames = frames_of(frame, main_script)
        if not any(each.user for each in frames):
            path = warning.filename
            frames = (Frame(path, warning.lineno, "", is_user_file(path, main_script)),)
        place = next((each for each in frames if each.user), frames[0])
        key = topic, place.file, place.line
        if key in self._told:
            return
        self._told.add(key)
        self.recorder.event(
            Warned,
            topic=topic,
            text=text[:_LONGEST_TEXT],
            category=warning.category.__name__,
            site=CallSite(frames),
        )
