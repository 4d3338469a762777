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
from functools import partial
from typing import ClassVar

from distdiag.probes.base import AnyCallable, Probe, Wrap
from distdiag.probes.files.calls import (
    ACCESS,
    CALLS,
    CONNECT,
    METHODS,
    QUESTIONS,
    RMTREE,
    asking,
    calling,
)
from distdiag.probes.files.libraries import MODULES, replace_in
from distdiag.probes.files.locks import FileLocks, replace_in_sockets
from distdiag.probes.files.log import FileLog
from distdiag.probes.files.opens import opening, opening_descriptor
from distdiag.probes.patching.post_import import ImportHook
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class FileProbe(Probe):
    """Records what is done with files, folders and locks, from Python and by known libraries."""

    name: ClassVar[str] = "files"

    def __init__(
        self, recorder: Recorder, before_sync: Signal[[bool]], file_access: Signal[[]]
    ) -> None:
        """Replace nothing until `install`."""
        super().__init__(recorder)
        self._log = FileLog(self, before_sync, file_access)
        self._imports = ImportHook({*MODULES, "sqlite3", "socket"}, self._on_import)

    def _install(self) -> None:
        log = self._log
        locks = FileLocks(log)
        patches = self._patches
        patches.wrap(builtins, "open", partial(opening, log=log))
        patches.wrap_all(fcntl, dict.fromkeys(("flock", "lockf"), locks.locking))
        calls = {row.api.removeprefix("os."): row for row in CALLS if row.api.startswith("os.")}
        makes: dict[str, Wrap] = {
            name: partial(calling, row=row, log=log) for name, row in calls.items()
        }
        makes |= {"open": partial(opening_descriptor, log=log)}
        makes |= dict.fromkeys(("chdir", "fchdir"), self._moving)
        makes |= {"access": partial(asking, row=ACCESS, log=log)}
        patches.wrap_all(os, makes)
        patches.wrap_everywhere(shutil, "rmtree", partial(calling, row=RMTREE, log=log))
        for question in QUESTIONS:
            make = partial(asking, row=question, log=log)
            patches.wrap_everywhere(question.owner, question.name, make)
        for question in METHODS:
            make = partial(asking, row=question, log=log)
            patches.add(pathlib.Path, question.name, make)
        self._imports.start()

    def _on_import(self, name: str) -> None:
        if self.is_off:
            return
        with self.guard:
            if name == "socket":
                replace_in_sockets(self._log, self._patches)
            elif name == "sqlite3":
                make = partial(calling, row=CONNECT, log=self._log)
                self._patches.wrap(sys.modules[name], "connect", make)
            else:
                replace_in(name, self._log, self._patches)

    def _moving(self, original: AnyCallable) -> AnyCallable:
        """Return what comes before a function that changes where relative paths begin."""

        def call(*args: object, **kwargs: object) -> object:
            try:
                return original(*args, **kwargs)
            finally:
                self._log.paths.forget_cwd()
                self._log.see_anew()  # the same words name other files now

        return call

    def uninstall(self) -> None:
        """Put all functions back."""
        super().uninstall()
        self._imports.stop()
        self._log.sync.end()
