"""Keeps the process that ranks are forked from, for ``@pytest.mark.distdiag(reuse="module")``."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import pytest

from distdiag.events.errors import UsageError

_SERVER: Final = pytest.StashKey["RankServer"]()

START_S: Final = 90.0
"""Importing torch may take so long, as for a rank that is started by itself."""
MOST_BYTES: Final = 1 << 16
"""Of one answer, which is a number or two."""
END_S: Final = 5.0
"""A server ends within this time once nobody asks it any more."""
ANSWER_S: Final = 30.0
"""A fork takes milliseconds; a machine that swaps takes seconds."""


class ForkedRank:
    """A rank that the server has forked; it answers as a `subprocess.Popen` does."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Return how it ended, None if it has not."""
        return self._server.status(self.pid)

    def wait(self, timeout: float) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it did not end in that time.

        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired("rank", timeout)
            self._server.await_message(left_s)
        return status


class RankServer:
    """The process that has imported torch once, and forks the ranks of one test after the other."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            UsageError: no ranks can be forked from it.

        """
        self._statuses: dict[int, int] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_over = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "distdiag.testing.rank_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # some libraries say that they are imported
                # A thread of OpenMP would be missing in what is forked.
                env={**environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        threads = self._answer("threads", START_S)
        if threads != 1:
            self.close()
            raise UsageError(f"a process that has imported torch has {threads} threads, not one")

    @property
    def lives(self) -> bool:
        """Whether ranks can be forked from it."""
        return not self._is_over and self._process.poll() is None

    def start(
        self, root: Path, environ: Mapping[str, str], log: IO[bytes], listener: int | None
    ) -> ForkedRank:
        """Fork a rank.

        Raises:
            OSError: the server is gone.

        """
        request = {"root": str(root), "environ": dict(environ), "folder": os.getcwd()}
        descriptors = [log.fileno()] if listener is None else [log.fileno(), listener]
        socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
        pid = self._answer("started", ANSWER_S)
        if pid is None:
            raise ConnectionResetError("the process that ranks are forked from has ended")
        return ForkedRank(self, pid)

    def status(self, pid: int) -> int | None:
        """Return how a rank ended; all have when the server is gone."""
        while not self._is_over and select.select([self._channel], [], [], 0)[0]:
            self._take()
        return self._statuses.get(pid, -9 if self._is_over else None)

    def await_message(self, timeout_s: float) -> None:
        """Wait until the server has something to say."""
        if not self._is_over:
            select.select([self._channel], [], [], timeout_s)

    def close(self) -> None:
        """End the server, which takes ranks that still run along."""
        self._channel.close()
        self._is_over = True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()

    def _answer(self, name: str, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while not self._is_over and (left_s := deadline - time.monotonic()) > 0:
            self.await_message(left_s)
            if select.select([self._channel], [], [], 0)[0]:
                message = self._take()
                if name in message:
                    return int(message[name])
        return None

    def _take(self) -> dict[str, Any]:
        """Read one message; one that a rank has ended is kept."""
        try:
            form = self._channel.recv(MOST_BYTES)
        except OSError:
            form = b""
        if not form:
            self._is_over = True
            return {}
        message: dict[str, Any] = json.loads(form)
        if "ended" in message:
            self._statuses[message["ended"]] = message["status"]
        elif "started" in message:
            self._statuses.pop(message["started"], None)  # the number of a process that is gone
        return message


def server_for(item: pytest.Function, environ: Mapping[str, str]) -> RankServer | None:
    """Return the server of the module of a test; None, with a warning, if there can be none."""
    module = item.getparent(pytest.Module)
    if module is None:
        return None
    server = module.stash.get(_SERVER, None)
    if server is not None and server.lives:
        return server
    try:
        server = RankServer(environ)
    except (OSError, UsageError) as error:
        item.warn(pytest.PytestWarning(f"reuse: ranks are started anew: {error}"))
        return None
    module.stash[_SERVER] = server
    module.addfinalizer(server.close)
    return server
