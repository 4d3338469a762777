"""Sockets that have a path: who connects needs the file that another rank makes by binding."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any, Final

from distdiag.event import FileAction
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.file_access import Attempt
from distdiag.probes.file_log import FileLog
from distdiag.probes.file_paths import as_text
from distdiag.probes.stack import caller

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
    def method(self_: Any, address: Any) -> Any:  # noqa: ANN401
        if self_.family is not socket.AF_UNIX or log.probe.is_off:
            return original(self_, address)
        access = None
        try:
            path = as_text(address)
            is_exclusive = action is FileAction.WRITE
            # A name that begins with a zero byte is no file.
            if path is not None:
                attempt = Attempt(action, path, api, is_exclusive=is_exclusive)
                access = log.begin(attempt, caller())
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            log.probe.fail(error)
        if access is None:
            return original(self_, address)
        return log.carry_out(access, original, ((self_, address), {}))

    return method
