"""What functions of the program return, and where its optimizers take parts for the whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

from distdiag.probes.call_sites import is_own_file
from distdiag.record.user_code import is_user_file

Returned = Callable[[str, object, FrameType], None]
Called = Callable[[FrameType], None]

_TAKES_THE_PART: Final = ("to_local", "torch/distributed/tensor/_api.py")
"""The method by which an optimizer gets at its rank's part of a DTensor."""


class Functions:
    """Sees calls by Python's profiler while it is on; a profiler of the program goes first."""

    def __init__(self, main_script: str | None, returned: Returned, took_part: Called) -> None:
        """Call `returned` with what functions of the program return.

        `took_part` gets the frame of the program that has asked a DTensor for its part.
        """
        self._main_script = main_script
        self._returned = returned
        self._took_part = took_part
        self._pid = os.getpid()
        self._is_wanted: dict[CodeType, bool] = {}
        self._on_return, self._on_call = self._see_return, self._see_call

    def watch_returns(self) -> None:
        """Tell what the functions of the program return from now on."""
        self._watch(self._on_return)

    def watch_parts(self) -> None:
        """Tell who asks for parts from now on."""
        self._watch(self._on_call)

    def stop(self) -> None:
        """Look at nothing."""
        if sys.getprofile() in (self._on_return, self._on_call):
            sys.setprofile(None)

    def _watch(self, callback: Callable[[FrameType, str, object], None]) -> None:
        self.stop()
        if sys.getprofile() is None:
            sys.setprofile(callback)

    def _see_return(self, frame: FrameType, event: str, value: object) -> None:
        if event == "return" and value is not None and self._wanted(frame.f_code):
            if os.getpid() != self._pid:  # a worker that was forked meanwhile
                sys.setprofile(None)
                return
            self._returned(frame.f_code.co_qualname, value, frame)

    def _see_call(self, frame: FrameType, event: str, _: object) -> None:
        name, file = _TAKES_THE_PART
        code = frame.f_code
        if event == "call" and code.co_name == name and code.co_filename.endswith(file):
            caller = frame.f_back
            if caller is not None and self.is_of_program(caller.f_code):
                self._took_part(caller)

    def _wanted(self, code: CodeType) -> bool:
        """Say whether this is a function of the program; modules are seen by their hooks."""
        found = self._is_wanted.get(code)
        if found is None:
            is_module = code.co_name == "forward" and code.co_varnames[:1] == ("self",)
            is_named = not code.co_name.startswith("<") and not is_module
            found = self._is_wanted[code] = is_named and self.is_of_program(code)
        return found

    def is_of_program(self, code: CodeType) -> bool:
        """Say whether code is the program's own."""
        path = code.co_filename
        return is_user_file(path, self._main_script) and not is_own_file(path, self._main_script)
