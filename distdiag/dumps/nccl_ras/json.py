"""The JSON that NCCL's RAS subsystem answers with, since NCCL 2.28.7."""

import re
from collections import defaultdict
from typing import Final

import msgspec

from distdiag.dumps.nccl_ras.status import Communicator, Lag, Member, RasStatus, lags_of

# NCCL 2.28.7 and 2.28.9 forget a comma in each of the missing ranks.
_NO_COMMA: Final = re.compile(rb'("nvml_dev":\s*-?\d+)(\s*"status")')

_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7
_RESULTS: Final = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
    8: "timeout",
}
"""The names of NCCL's results, ``ncclResult_t``."""


class _Status(msgspec.Struct, frozen=True):
    init_state: int = 0
    async_error: int = 0
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct, frozen=True):
    rank: int
    host: str = ""
    pid: int = -1
    status: _Status = _Status()
    collective_counts: dict[str, int] = {}

    def member(self, note: str = "") -> Member:
        return Member(self.rank, self.pid if self.pid > 0 else None, self.host, note)


class _Communicator(msgspec.Struct, frozen=True):
    hash: str
    size: int = 0
    ranks: tuple[_Rank, ...] = ()
    missing_ranks: tuple[_Rank, ...] = ()


class _Ras(msgspec.Struct, frozen=True):
    timeouts_count: int = 0


class _Answer(msgspec.Struct, frozen=True):
    communicators: tuple[_Communicator, ...]
    nccl_version: str = ""
    ras: _Ras = _Ras()


_decode: Final = msgspec.json.Decoder(_Answer).decode


def parse_json(data: bytes) -> RasStatus:
    """Parse an answer.

    Raises:
        msgspec.MsgspecError: it is not what NCCL answers.

    """
    try:
        answer = _decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        answer = _decode(_NO_COMMA.sub(rb"\1,\2", data))
    every = [rank for c in answer.communicators for rank in (*c.ranks, *c.missing_ranks)]
    dead = {rank.pid: rank.member() for rank in every if rank.status.considered_dead}
    told = [_communicator(communicator) for communicator in answer.communicators]
    return RasStatus(
        nccl_version=answer.nccl_version,
        num_communicators=len(answer.communicators),
        communicators=tuple(communicator for communicator in told if communicator.is_sick),
        dead=tuple(dead.values()),
        num_timeouts=answer.ras.timeouts_count,
        pids=frozenset(rank.pid for rank in every if rank.pid > 0),
    )


def _communicator(told: _Communicator) -> Communicator:
    return Communicator(
        name=told.hash,
        size=told.size,
        lags=tuple(_lags(told.ranks)),
        missing=tuple(rank.member(_why_missing(rank.status)) for rank in told.missing_ranks),
        num_missing=len(told.missing_ranks),
        odd=tuple(rank.member(note) for rank in told.ranks if (note := _state(rank.status))),
    )


def _lags(ranks: tuple[_Rank, ...]) -> list[Lag]:
    groups: dict[str, dict[int, list[Member]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for op, count in rank.collective_counts.items():
            groups[op][count].append(rank.member())
    return [
        lag
        for op, by_count in groups.items()
        for lag in lags_of(op, ((n, len(ms), tuple(ms)) for n, ms in sorted(by_count.items())))
    ]


def _why_missing(status: _Status) -> str:
    if status.considered_dead:
        return "considered dead"
    return "unresponsive" if status.unresponsive else "no member (any more, or yet)"


def _state(status: _Status) -> str:
    """Say in which state a rank is, if it is not simply running."""
    if status.abort_flag:
        return "aborted"
    if status.finalize_called or status.destroy_flag:
        return "being finalized"
    for value, moment in ((status.init_state, "initialization"), (status.async_error, "")):
        if value not in (_SUCCESS, _IN_PROGRESS):
            return f"{moment} {_RESULTS.get(value, f'error {value}')}".strip()
    return "being initialized" if status.init_state == _IN_PROGRESS else ""
