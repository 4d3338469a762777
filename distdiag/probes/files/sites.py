"""Where accesses to files are made: a key that is cheap to take, and the call site behind it."""

import os
from collections.abc import Hashable
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from distdiag.events.base import CallSite, Frame
from distdiag.probes.call_sites import MAX_FRAMES, frames_of, is_own_file, stack_key
from distdiag.record.recorder import Recorder, Site
from distdiag.record.thread_context import ThreadContext
from distdiag.record.user_code import is_user_file

# Modules by which the interpreter reads source files and metadata for itself.
_READERS: Final = frozenset(
    {
        "importlib",
        "inspect",
        "linecache",
        "pkgutil",
        "runpy",
        "sysconfig",
        "tokenize",
        "traceback",
        "zipimport",
    }
)
_PROBES: Final = str(Path(__file__).parents[1]) + os.sep
_MOST_CODES: Final = 20_000

_FOREIGN: Final = 0
USER: Final = 1
_READER: Final = 2
_NOBODY: Final = -1

Stack = tuple[int, ...]
"""The place of each frame in its code, from the innermost to the first one of the user's own. Where
there is none the whole stack, and then `_NOBODY`."""


class FileSites:
    """The call sites of accesses, found again by the stack down to the user's own code."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.kinds: dict[int, int] = {}  # of code objects, by their ids
        self._kept_alive: list[CodeType] = []
        self._lenders: dict[str, tuple[Hashable, tuple[Frame, ...]]] = {}

    def stack(self, frame: FrameType | None) -> Stack | None:
        """Return the key of a stack; None if the interpreter or the tool itself is at work."""
        key: list[int] = []
        kinds = self.kinds
        while frame is not None:
            number = id(frame.f_code)
            key.append(number + frame.f_lasti)
            kind = kinds.get(number)
            if kind is None:
                kind = self._learn(frame)
            if kind == USER:
                return tuple(key)
            if kind == _READER:
                return None
            frame = frame.f_back
        key.append(_NOBODY)
        return tuple(key)

    def _learn(self, frame: FrameType) -> int:
        if len(self.kinds) >= _MOST_CODES:
            self.kinds.clear()
            self._kept_alive.clear()
        code, script = frame.f_code, self._recorder.main_script
        path, module = code.co_filename, str(frame.f_globals.get("__name__", ""))
        # Wrappers that our probes have put around a library are in the middle of many stacks.
        is_ours = is_own_file(path, script) and not path.startswith(_PROBES)
        if is_ours or module.partition(".")[0] in _READERS:
            kind = _READER
        else:
            kind = USER if is_user_file(path, script) else _FOREIGN
        self._kept_alive.append(code)  # or another code could get its number
        self.kinds[id(code)] = kind
        return kind

    def find(self, stack: Stack, frame: FrameType, context: ThreadContext) -> Site:
        """Return the call site, written down if it is new."""
        is_helper = context.name is not None and stack[-1] == _NOBODY
        lender = self._lender_of(frame) if is_helper and self._lenders else None
        key: Hashable = stack if lender is None else (stack, lender[0])
        known = self._recorder.tables.sites.get(key)
        if known is not None:
            return known
        frames = frames_of(frame, self._recorder.main_script)
        if lender is not None:
            frames = (frames + lender[1])[:MAX_FRAMES]
        return self._define(key, CallSite(frames, context.module), _codes(frame))

    def find_again(self, frames: tuple[Frame, ...]) -> Site:
        """Return a call site whose stack is not there any more."""
        known = self._recorder.tables.sites.get(frames)
        return known or self._define(frames, CallSite(frames), None)

    def _define(self, key: Hashable, site: CallSite, kept_alive: object) -> Site:
        return self._recorder.define_site(
            key, site, api=None, is_own_call=False, kept_alive=kept_alive
        )

    def lend(self, package: str, frame: FrameType) -> None:
        """Let threads of a package that know no caller of the user's show this one."""
        if self._recorder.here.context.name is None:
            self._lenders[package] = (
                stack_key(frame),
                frames_of(frame, self._recorder.main_script),
            )

    def _lender_of(self, frame: FrameType | None) -> tuple[Hashable, tuple[Frame, ...]] | None:
        while frame is not None:
            module = f"{frame.f_globals.get('__name__', '')}."
            for package, lender in self._lenders.items():
                if module.startswith(f"{package}."):
                    return lender
            frame = frame.f_back
        return None


def _codes(frame: FrameType | None) -> list[CodeType]:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes
