"""Accesses to files that other ranks may see: the probe and what it puts in place.

It needs no torch and is there before the script begins: what a rank reads or writes before the
process group exists is where guards by rank go wrong.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import pathlib
import shutil
import sys
from typing import Any, ClassVar

from distdiag.probes.base import AnyCallable, Probe
from distdiag.probes.built_ins import Replacements, StandIn, stand_in
from distdiag.probes.file_calls import CALLS, calling
from distdiag.probes.file_libraries import MODULES, replace_in
from distdiag.probes.file_locks import FileLocks
from distdiag.probes.file_log import FileLog
from distdiag.probes.file_opens import opening, opening_descriptor
from distdiag.probes.file_sockets import replace_in_sockets
from distdiag.probes.file_tests import METHODS, QUESTIONS, asking
from distdiag.probes.post_import import ImportWatch
from distdiag.recorder import Recorder

_BUILT_IN_OWNERS = {"os": os, "shutil": shutil}


class FileWatch(Probe):
    """Records what is done with files, folders and locks, from Python and by known libraries."""

    name: ClassVar[str] = "files"

    def __init__(self, recorder: Recorder) -> None:
        """Replace nothing until `install`."""
        super().__init__(recorder)
        self._replaced = Replacements()
        self._imports = ImportWatch({*MODULES, "sqlite3", "socket"}, self._on_import)

    def _install(self) -> None:
        self._log = log = FileLog(self)
        locks = FileLocks(log)
        pairs: dict[str, tuple[AnyCallable, AnyCallable]] = {
            "open": (builtins.open, opening(builtins.open, log)),
            "os.open": (os.open, opening_descriptor(os.open, log)),
            "os.chdir": (os.chdir, self._moving(os.chdir)),
            "os.fchdir": (os.fchdir, self._moving(os.fchdir)),
            "flock": (fcntl.flock, locks.locking(fcntl.flock)),
            "lockf": (fcntl.lockf, locks.locking(fcntl.lockf)),
        }
        for row in CALLS:
            owner, _, name = row.api.partition(".")
            if owner in _BUILT_IN_OWNERS:
                original = vars(_BUILT_IN_OWNERS[owner])[name]
                pairs[row.api] = (original, calling(original, row, log))
        for question in QUESTIONS:
            original = vars(question.owner)[question.name]
            pairs[question.api] = (original, asking(original, question, log))
        self._replaced.replace_all(pairs)
        for question in METHODS:
            original = vars(pathlib.Path).get(question.name)
            if original is not None:
                self._patches.replace(pathlib.Path, question.name, asking(original, question, log))
        self._imports.start()

    def _on_import(self, name: str) -> None:
        if self.is_off:
            return
        try:
            if name == "socket":
                replace_in_sockets(self._log, self._patches)
            elif name == "sqlite3":
                row = next(row for row in CALLS if row.api == "sqlite3.connect")
                original = vars(sys.modules[name])["connect"]
                self._replaced.replace(original, calling(original, row, self._log))
            else:
                replace_in(name, self._log, self._patches, self._replaced)
        except Exception as error:  # noqa: BLE001 (another version than we know: not observed)
            self.fail(error)

    def _moving(self, original: AnyCallable) -> StandIn:
        """Return the stand-in of a function that changes where relative paths begin."""

        def call(_: StandIn, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return original(*args, **kwargs)
            finally:
                self._log.paths.forget_cwd()
                self._log.see_anew()  # the same words name other files now

        return stand_in(original, call)

    def uninstall(self) -> None:
        """Put all functions back."""
        super().uninstall()
        self._imports.stop()
        self._replaced.undo()
        self.recorder.before_sync = None
