"""Locks on files: taken by `fcntl`, given back by it or when the file is closed."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import weakref
from functools import partial
from types import FrameType
from typing import Any, Final

from distdiag.events.files import FileAction
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.call_sites import caller
from distdiag.probes.files.log import Access, Attempt, FileLog
from distdiag.probes.files.open_files import OpenFile, descriptor_is_open, file_is_open
from distdiag.probes.files.paths import as_text
from distdiag.probes.untyped import Untyped

# Sockets that have a path: who connects needs the file that another rank makes by binding.

_METHODS: Final = {
    "bind": FileAction.WRITE,
    "connect": FileAction.CONNECT,
    "connect_ex": FileAction.CONNECT,
}


def replace_in_sockets(log: FileLog, patches: Patches) -> None:
    """Put the methods of Python's sockets that take a path under observation."""
    for name, action in _METHODS.items():
        patches.add(socket.socket, name, partial(_method, action=action, log=log))


def _method(original: AnyCallable, action: FileAction, log: FileLog) -> AnyCallable:
    api = f"socket.{original.__name__}"

    @wrap_like(original)
    def method(self_: Untyped, address: Untyped) -> Untyped:
        if self_.family is not socket.AF_UNIX or log.probe.is_off:
            return original(self_, address)
        access = None
        with log.guard:
            path = as_text(address)
            is_exclusive = action is FileAction.WRITE
            # A name that begins with a zero byte is no file.
            if path is not None:
                attempt = Attempt(action, path, api, is_exclusive=is_exclusive)
                access = log.begin(attempt, caller())
        if access is None:
            return original(self_, address)
        return log.carry_out(access, original, ((self_, address), {}))

    return method


# Follows the locks that a process holds.

_DELETED: Final = " (deleted)"
# What was opened with O_TMPFILE: nobody else can lock it.
_NAMELESS: Final = re.compile(r"/#\d+ \(deleted\)$")


class _Held:
    """A lock that this process holds by a descriptor."""

    __slots__ = ("access", "descriptor", "file", "reference")

    file: OpenFile
    reference: weakref.ref[Any]

    def __init__(self, access: Access, descriptor: int) -> None:
        self.access = access
        self.descriptor = descriptor


class FileLocks:
    """Writes LOCK when a lock has been taken, UNLOCK before it is given back."""

    def __init__(self, log: FileLog) -> None:
        self._log = log
        self._held: dict[int, _Held] = {}

    def locking(self, original: AnyCallable) -> AnyCallable:
        """Return what comes before `fcntl.flock` or `fcntl.lockf`."""
        probe, recorder, guard = self._log.probe, self._log.recorder, self._log.guard
        api = f"fcntl.{original.__name__}"
        locks_for_process = original.__name__ == "lockf"

        def call(*args: object, **kwargs: object) -> object:
            if probe.off or recorder.closed or len(args) < 2 or not isinstance(args[1], int):
                return original(*args, **kwargs)
            file, operation = args[0], args[1]
            if operation & fcntl.LOCK_UN:
                with guard:
                    self._release(file)
            result = original(*args, **kwargs)
            if operation & (fcntl.LOCK_EX | fcntl.LOCK_SH):
                if locks_for_process:
                    # Closing any descriptor of the file ends such a lock: look at no file any more.
                    self._log.reads_content = False
                with guard:
                    self._taken(file, api, caller())
            return result

        return call

    def _taken(self, file: object, api: str, frame: FrameType) -> None:
        log, descriptor = self._log, _descriptor(file)
        before = self._held.get(descriptor)
        if before is not None and before.file.is_open():
            return  # shared made exclusive, or the other way round
        if before is not None:
            self._give_back(before)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if _NAMELESS.search(path):
            return
        path = path.removesuffix(_DELETED)
        log.see_anew()
        access = log.begin(Attempt(FileAction.LOCK, path, api), frame)
        if access is None:
            return
        log.succeeded(access)
        held = _Held(access, descriptor)
        is_open = descriptor_is_open(descriptor) if isinstance(file, int) else file_is_open(file)
        held.file = OpenFile(is_open, lambda: self._given_back(held), is_lock=True)
        if not isinstance(file, int):
            held.reference = weakref.ref(file, lambda _: self._vanished(held))
        self._held[descriptor] = held
        log.open_files.add(held.file)

    def _release(self, file: object) -> None:
        held = self._held.get(_descriptor(file))
        if held is not None:
            self._give_back(held)

    def _vanished(self, held: _Held) -> None:
        if not self._log.probe.is_off and self._held.get(held.descriptor) is held:
            with self._log.guard:
                self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        self._log.open_files.remove(held.file)
        self._log.open_files.settle()  # what was written under the lock ends before it
        self._given_back(held)

    def _given_back(self, held: _Held) -> None:
        if self._held.get(held.descriptor) is held:
            del self._held[held.descriptor]
            self._log.give_back(held.access, FileAction.UNLOCK)


def _descriptor(file: Untyped) -> int:
    return file if isinstance(file, int) else int(file.fileno())
