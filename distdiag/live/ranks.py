"""Which processes of this node are ranks of a job that runs now, known from their environment.

A launcher gives each rank its number, and the rank's own children inherit it: data-loader workers,
servers of shared memory, compilers. A pod or a scheduler gives numbers to the launcher, too. So a
rank is a Python process with the numbers of a rank that is no launcher and no child of a rank.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import msgspec
import psutil

from distdiag.events.errors import UsageError

LARGEST_WORLD: Final = 1 << 20
LAUNCHERS: Final = frozenset(
    {
        "accelerate",
        "accelerate.commands.launch",
        "deepspeed",
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
        "distdiag",
        "distdiag.cli",
        "distdiag.monitor",
        "torch.distributed.launch",
        "torch.distributed.run",
        "torchrun",
    }
)
"""Programs that have the environment of a rank and are none."""

_PYTHON: Final = re.compile(r"python|pypy")
_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_UNSAFE: Final = re.compile(r"[^\w.:@-]")
_MOST_ANCESTORS: Final = 64


class LiveRank(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is a rank. `job` tells the jobs of a node apart: ``node0:29500``."""

    job: str
    rank: int
    local_rank: int
    world_size: int
    hostname: str
    pid: int
    command: tuple[str, ...] = ()
    folder: str = ""


class Search(NamedTuple):
    """The ranks of a node by job and number, and how many Python processes did not let us look."""

    ranks: tuple[LiveRank, ...]
    num_hidden: int


class _Family(NamedTuple):
    """The names under which a launcher tells a rank its number; the first is the surest."""

    rank: str
    world_size: str
    local_rank: str
    job: tuple[str, ...]
    scheduler: str = ""


_FAMILIES: Final = (
    _Family("RANK", "WORLD_SIZE", "LOCAL_RANK", ("MASTER_ADDR", "MASTER_PORT")),
    _Family(
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "slurm"
    ),
    _Family(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("PMIX_NAMESPACE",),
        "mpi",
    ),
)
_GUESSED: Final = -1
_SCHEDULED: Final = 0
_NUMBERED: Final = 1
_LAUNCHED: Final = 2


class _Claim(NamedTuple):
    """What the environment of a process says about it.

    `weight` tells how sure that is: guessed, given to any program of a scheduler's job, numbered as
    a rank or as the node of a launcher, or numbered within its node as well.
    """

    job: str
    rank: int
    world_size: int
    local_rank: int | None
    attempt: int
    weight: int

    @property
    def numbers(self) -> tuple[int, int]:
        return (self.rank, self.world_size)


class _Candidate(NamedTuple):
    pid: int
    started_s: float
    claim: _Claim
    command: tuple[str, ...]
    folder: str

    def as_rank(self) -> LiveRank:
        claim = self.claim
        return LiveRank(
            job=claim.job,
            rank=claim.rank,
            local_rank=claim.rank if claim.local_rank is None else claim.local_rank,
            world_size=claim.world_size,
            hostname=platform.node(),
            pid=self.pid,
            command=self.command,
            folder=self.folder,
        )


def find_ranks() -> Search:
    """Look at every process of this node."""
    candidates: dict[int, _Candidate] = {}
    parents: dict[int, int] = {}
    num_hidden = 0
    myself = psutil.Process().pid
    for process in psutil.process_iter():
        try:
            parents[process.pid] = process.ppid()
            if process.pid != myself and (candidate := _candidate(process)) is not None:
                candidates[process.pid] = candidate
        except psutil.AccessDenied:
            num_hidden += _is_python(process)
        except psutil.NoSuchProcess:  # it ended meanwhile, or is a zombie
            continue
    ancestors = {pid: list(_ancestors(pid, parents, candidates)) for pid in candidates}
    return Search(_without_others(candidates, ancestors), num_hidden)


def ranks_of_pids(pids: Sequence[int]) -> tuple[LiveRank, ...]:
    """Return these processes as the ranks of one job.

    Their environment tells their numbers; where that of one is silent, the order of `pids` does.

    Raises:
        UsageError: a process is not there or not to be looked at, or two have the same number.

    """
    found: list[_Candidate] = []
    for place, pid in enumerate(pids):
        try:
            process = psutil.Process(pid)
            claim = _claim(process.environ()) or _guess(place, len(pids))
            found.append(_described(process, claim))
        except psutil.AccessDenied:
            raise UsageError(f"process {pid} belongs to another user") from None
        except psutil.NoSuchProcess:
            raise UsageError(f"there is no process {pid}") from None
    if any(candidate.claim.weight == _GUESSED for candidate in found):
        found = [c._replace(claim=_guess(place, len(pids))) for place, c in enumerate(found)]
    names = {(candidate.claim.job, candidate.claim.rank) for candidate in found}
    if len(names) < len(found):
        raise UsageError("two of the processes are the same rank of the same job")
    return tuple(candidate.as_rank() for candidate in found)


def _candidate(process: psutil.Process) -> _Candidate | None:
    claim = _claim(process.environ())
    if claim is None or not _is_python(process):
        return None
    return _described(process, claim)


def _described(process: psutil.Process, claim: _Claim) -> _Candidate:
    try:
        folder = process.cwd()
    except psutil.AccessDenied:
        folder = ""
    command = tuple(_text(word) for word in process.cmdline())
    return _Candidate(process.pid, process.create_time(), claim, command, _text(folder))


def _text(name: str) -> str:
    """Spell out bytes that are no UTF-8: JSON has no form for them."""
    return name.encode("utf-8", "backslashreplace").decode()


def _is_python(process: psutil.Process) -> bool:
    try:
        name = PurePosixPath(process.exe()).name or process.name()
    except psutil.AccessDenied:
        name = process.name()
    except psutil.NoSuchProcess:
        return False
    return _PYTHON.match(name) is not None


def _guess(place: int, num_pids: int) -> _Claim:
    return _Claim("pids", place, num_pids, place, 0, _GUESSED)


def _claim(environ: Mapping[str, str]) -> _Claim | None:
    for family in _FAMILIES:
        rank, world_size = _number(environ, family.rank), _number(environ, family.world_size)
        # A scheduler gives numbers to programs of one process, too: those are no jobs.
        least = 2 if family.scheduler else 1
        if rank is None or world_size is None or world_size < least or rank >= world_size:
            continue
        local_rank = _number(environ, family.local_rank)
        names = [environ.get(name, "?") or "?" for name in family.job]
        job = ":".join([family.scheduler, *names] if family.scheduler else names)
        attempt = _number(environ, "TORCHELASTIC_RESTART_COUNT") or 0
        weight = _NUMBERED if local_rank is None else _LAUNCHED
        if family.scheduler:
            weight = _SCHEDULED
        return _Claim(_UNSAFE.sub("_", job), rank, world_size, local_rank, attempt, weight)
    return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    # Not isdecimal() alone: it is true of digits of other scripts, and a number may be endless.
    is_number = text.isascii() and text.isdecimal() and len(text) < 9
    return int(text) if is_number and int(text) <= LARGEST_WORLD else None


def _ancestors(
    pid: int, parents: Mapping[int, int], candidates: Mapping[int, _Candidate]
) -> Iterator[_Candidate]:
    for _ in range(_MOST_ANCESTORS):
        pid = parents.get(pid, 0)
        if pid in candidates:
            yield candidates[pid]


def _without_others(
    candidates: Mapping[int, _Candidate], ancestors: Mapping[int, Iterable[_Candidate]]
) -> tuple[LiveRank, ...]:
    """Leave out launchers and children of ranks; of two that are the same rank, keep the likely."""
    launchers = {c.pid for c in candidates.values() if _program(c.command) in LAUNCHERS}
    for pid, above in ancestors.items():
        launchers |= {a.pid for a in above if _has_launched(a.claim, candidates[pid].claim)}
    ranks: dict[tuple[str, int], _Candidate] = {}
    # The newest attempt; in it the oldest process, since a rank is older than what it started.
    for candidate in sorted(
        candidates.values(), key=lambda c: (-c.claim.attempt, c.started_s, c.pid)
    ):
        is_child = any(
            a.pid not in launchers and _is_of_same_rank(a.claim, candidate.claim)
            for a in ancestors[candidate.pid]
        )
        if candidate.pid not in launchers and not is_child:
            ranks.setdefault((candidate.claim.job, candidate.claim.rank), candidate)
    return tuple(ranks[name].as_rank() for name in sorted(ranks))


def _has_launched(ancestor: _Claim, claim: _Claim) -> bool:
    return claim.weight > ancestor.weight and claim.numbers != ancestor.numbers


def _is_of_same_rank(ancestor: _Claim, claim: _Claim) -> bool:
    # A script that takes its numbers from the scheduler gives its children those of torch.
    is_same_job = ancestor.job == claim.job or ancestor.weight == _SCHEDULED
    return is_same_job and ancestor.numbers == claim.numbers


def _program(command: Sequence[str]) -> str:
    """Return the module or the file name of the script that a Python command runs."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return PurePosixPath(word).name
    return ""
