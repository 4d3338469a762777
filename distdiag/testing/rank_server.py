"""Forks ranks from one process that has imported torch: ``python -m distdiag.testing.rank_server``.

Each rank of each test is a process of its own that has run nothing before, so whatever a test does
to its ranks ends with them; what is shared is the time that the imports take.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from distdiag.testing.rank import die_with_parent, leave, main

MOST_BYTES: Final = 1 << 20
"""Of one message; an environment is far smaller (Linux limits each variable to 128 KiB)."""

_PRELOADED: Final = (
    "numpy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""What many tests import, torch._dynamo with the first optimizer. What the agent patches is then
there when it starts."""


def serve(requests: socket.socket) -> Mapping[str, Any] | None:
    """Fork a rank for each request and tell how each ended.

    Return what was asked for in a rank, and None in the server when nobody asks any more.
    """
    wake, waking = socket.socketpair()
    wake.setblocking(False)
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    while True:
        ready = select.select([requests, wake], [], [])[0]
        if wake in ready:
            with suppress(BlockingIOError):
                wake.recv(MOST_BYTES)
            for pid, status in _ended():
                requests.send(json.dumps({"ended": pid, "status": status}).encode())
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 2)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (requests, wake, waking):
                each.close()
            request: dict[str, Any] = json.loads(message)
            _become(request, descriptors)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(json.dumps({"started": pid}).encode())


def _ended() -> Iterator[tuple[int, int]]:
    """Yield the ranks that have ended since, each with the status that Popen would give it."""
    with suppress(ChildProcessError):
        while True:
            pid, how = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(how)


def _become(request: Mapping[str, Any], descriptors: list[int]) -> None:
    """Make the process what it would be if it had been started for this rank."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[0], 2)
    os.close(descriptors[0])
    if len(descriptors) > 1:
        os.environ["DISTDIAG_LISTENER"] = str(descriptors[1])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python does so for its own generator


def preload() -> int:
    """Import what nearly all ranks do; return the number of threads: only one can be forked."""
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    probes = importlib.import_module("distdiag.probes")
    for module in pkgutil.walk_packages(probes.__path__, "distdiag.probes."):
        with suppress(ImportError):  # some need what is not installed
            importlib.import_module(module.name)
    return len(os.listdir("/proc/self/task"))


def _run() -> int:
    die_with_parent()
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    requests.send(json.dumps({"threads": preload()}).encode())
    request = serve(requests)
    return 0 if request is None else main(request["root"], is_forked=True)


if __name__ == "__main__":
    leave(_run())
