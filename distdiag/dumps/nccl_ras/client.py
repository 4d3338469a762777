"""Asks NCCL itself how far each rank is: its RAS subsystem answers even while all ranks are stuck.

RAS (NCCL ≥ 2.24) is a thread in every process; all of a node share one TCP port. The protocol is
lines of text: ``CLIENT PROTOCOL 2`` is answered by ``SERVER PROTOCOL n``, settings by ``OK`` or
``ERROR: …``, ``VERBOSE STATUS`` by a report, after which NCCL closes the connection.

The report is gathered from all processes of the job, so one node's question is enough for all. Some
versions have crashed when they were asked while communicators were being created, so this is for
jobs that hang, and not for a hang in the initialization.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

import psutil

from distdiag.dumps.base import DumpSource
from distdiag.dumps.nccl_ras.json import parse_json
from distdiag.dumps.nccl_ras.status import Member, RasStatus, describe
from distdiag.dumps.nccl_ras.text import parse_text
from distdiag.dumps.process.proc import proc_text
from distdiag.events.base import Value
from distdiag.events.errors import UNDECODABLE
from distdiag.events.stacks import Observed

DEFAULT_ADDRESS: Final = "localhost:28028"
MOST_BYTES: Final = 64 << 20
MOST_SENTENCES: Final = 20
GREETING_S: Final = 1.0
"""All processes of a node listen on one port: who is stopped does not greet, and another may."""
TRIES: Final = 4
EXTRA_S: Final = 6.0
"""NCCL may take 5 s longer than the time limit that it is given."""

_LONGEST_LINE: Final = 4096

_RankOf = Callable[[Member], int | None]


class NcclRas(DumpSource):
    """Ask RAS where the first of the ranks listens."""

    name = "nccl-ras"

    def observe(self, pids: Mapping[int, int], timeout_s: float) -> tuple[Observed, ...]:
        """Tell of each rank whether NCCL sees it behind, and what it sees of the others."""
        environment = _environment(next(iter(pids.values()))) if pids else {}
        if environment.get("NCCL_RAS_ENABLE", "").strip() == "0":
            return self.failed(pids, "NCCL RAS is off: NCCL_RAS_ENABLE is 0")
        address = environment.get("NCCL_RAS_ADDR") or DEFAULT_ADDRESS
        try:
            status = ask(address, timeout_s)
        except ConnectionRefusedError:
            reason = "NCCL is not in use, is older than 2.24, or NCCL_RAS_ENABLE is 0"
            return self.failed(pids, f"nobody listens at {address}: {reason}")
        except TimeoutError:
            return self.failed(pids, f"NCCL at {address} gave no answer within {timeout_s:.3g} s")
        except (OSError, ValueError, *UNDECODABLE) as error:
            return self.failed(pids, f"NCCL at {address}: {error}")
        if status.pids and status.pids.isdisjoint(pids.values()):
            return self.failed(pids, f"the processes that answer at {address} are of another job")
        rank_of = _rank_of(pids)
        return tuple(self._tell(rank, status, rank_of) for rank in pids)

    def _tell(self, rank: int, status: RasStatus, rank_of: _RankOf) -> Observed:
        said = [line for known in status.communicators for line in describe(known, rank_of)]
        said += [f"process {m.pid} on {m.host} is considered dead" for m in status.dead]
        behind = [
            (lag, communicator)
            for communicator in status.communicators
            for lag in communicator.lags
            if any(rank_of(member) == rank for member in lag.members)
        ]
        values: dict[str, Value] = {
            "nccl_version": status.nccl_version,
            "num_communicators": status.num_communicators,
            "num_sick_communicators": len(status.communicators),
            "num_timeouts": status.num_timeouts,
            "operations_behind": sum(lag.most - lag.launched for lag, _ in behind),
            "differences": "\n".join(said[:MOST_SENTENCES]),
        }
        if behind:
            lag, communicator = behind[0]
            return self.observed(
                rank,
                f"NCCL says that it has launched {lag.launched} {lag.op} operations in "
                f"communicator {communicator.name}, and others {lag.most}",
                values,
            )
        number = status.num_communicators
        seen = f"NCCL {status.nccl_version} sees {number} communicator{'s' * (number != 1)}"
        return self.observed(rank, f"{seen}; {said[0]}" if said else f"{seen}, all equal", values)


def ask(address: str, timeout_s: float) -> RasStatus:
    """Ask for the status of the job, as JSON where that is known, else as text.

    Raises:
        OSError: nobody listens, or no answer came in time.
        ValueError: somebody else than NCCL answers.
        msgspec.MsgspecError: the JSON is not what NCCL answers.

    """
    deadline = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    place = (host.strip("[]") or "localhost", int(port))
    with _greeted(place, deadline) as connection:
        lines = _Lines(connection, deadline)
        limit_s = max(1, int(timeout_s - EXTRA_S))
        if (answer := lines.ask(f"TIMEOUT {limit_s}")) != "OK":
            raise ValueError(f"an unexpected answer: {answer[:100]!r}")
        is_json = lines.ask("SET FORMAT json") == "OK"
        report = lines.report("VERBOSE STATUS")
    return parse_json(report) if is_json else parse_text(report.decode(errors="replace"))


def _greeted(place: tuple[str, int], deadline: float) -> socket.socket:
    """Connect to a process that greets."""
    tries = TRIES
    while True:
        tries -= 1
        wait_s = max(0.01, min(GREETING_S, deadline - time.monotonic()))
        connection = socket.create_connection(place, wait_s)
        try:
            greeting = _Lines(connection, time.monotonic() + wait_s).ask("CLIENT PROTOCOL 2")
        except TimeoutError:
            connection.close()
            if not tries or time.monotonic() >= deadline:
                raise
            continue
        except OSError:
            connection.close()
            raise
        if greeting.upper().startswith("SERVER PROTOCOL "):
            return connection
        connection.close()
        raise ValueError(f"not NCCL, since it answers {greeting[:100]!r}")


class _Lines:
    """A connection that is asked in lines."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def ask(self, command: str) -> str:
        """Send a command and return the line that answers it."""
        self._send(command)
        answer = b""
        # Byte by byte: what follows the line belongs to the next answer.
        while not answer.endswith(b"\n") and len(answer) < _LONGEST_LINE:
            answer += self._receive(1)
        return answer.decode(errors="replace").strip()

    def report(self, command: str) -> bytes:
        """Send a command and return all that comes until the other side closes."""
        self._send(command)
        parts: list[bytes] = []
        length = 0
        while data := self._receive(1 << 16, may_end=True):
            parts.append(data)
            length += len(data)
            if length > MOST_BYTES:
                raise ValueError(f"the report is longer than {MOST_BYTES} bytes")
        return b"".join(parts)

    def _send(self, command: str) -> None:
        self._limit()
        self._connection.sendall(f"{command}\n".encode("ascii"))

    def _receive(self, most: int, *, may_end: bool = False) -> bytes:
        self._limit()
        data = self._connection.recv(most)
        if not data and not may_end:
            raise ConnectionResetError("the connection was closed in the middle of an answer")
        return data

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)


def _environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    pairs = (pair.partition("=") for pair in proc_text(pid, "environ").split("\0"))
    return {name: value for name, _, value in pairs}


def _rank_of(pids: Mapping[int, int]) -> _RankOf:
    """Return how members of communicators are recognised as ranks of this node."""
    interfaces = psutil.net_if_addrs().values()
    here = {address.address.partition("%")[0] for known in interfaces for address in known}
    ranks = {pid: rank for rank, pid in pids.items()}

    def rank_of(member: Member) -> int | None:
        if member.pid is None or member.host not in here:
            return None
        return ranks.get(member.pid)

    return rank_of
