"""The stacks of the ranks of running jobs: taken on one node, put together over several."""

import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final

import msgspec

from distdiag.analysis.jobs import JOB_PREFIX
from distdiag.dumps.base import dump_ranks
from distdiag.dumps.stacks.py_spy import PySpy
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.live.ranks import LARGEST_WORLD, LiveRank
from distdiag.record.private_file import make_private_folder
from distdiag.record.run_dir import write_atomically
from distdiag.record.user_code import main_script
from distdiag.views.stack_tree import StackTree

VERSION: Final = 1
"""The version of the form in which dumps travel."""

_MARK: Final = b'{"distdiag_dump":'


class RankStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one rank, main thread first; `error` says why there are none.

    Threads and frames are arrays: ``["MainThread", [["train.py", 41, "evaluate", true]], false,
    false]`` has frames of file, line, function and whether it is the user's code (innermost first),
    and tells whether the thread holds the GIL and whether it is active.
    """

    who: LiveRank
    threads: tuple[ThreadStack, ...] = ()
    error: str = ""

    def event(self) -> Stacks:
        """Return what the engine and the tree of stacks take in."""
        return Stacks(
            rank=self.who.rank,
            seq=-1,
            time_ns=time.monotonic_ns(),
            source=PySpy.name,
            threads=self.threads,
            error=self.error,
        )


class NodeDump(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has to say: its ranks, of one or more jobs.

    Example: ``{"distdiag_dump": 1, "hostname": "node0", "ranks": [{"who": {"job": "node0:29500",
    "rank": 0, …}, "threads": […], "error": ""}]}``.
    """

    distdiag_dump: int = VERSION
    hostname: str
    ranks: tuple[RankStacks, ...]

    def to_json(self) -> bytes:
        """Return one line, which `read_node_dump` finds again among others."""
        return msgspec.json.encode(self)


def read_node_dump(output: bytes) -> NodeDump:
    """Read the dump from what the command wrote, whatever a shell's start files wrote before it.

    Raises:
        DamagedFileError: there is no dump, or it is damaged.

    """
    line = next((line for line in reversed(output.splitlines()) if line.startswith(_MARK)), None)
    if line is None:
        raise DamagedFileError("the answer holds no dump")
    try:
        dump = msgspec.json.decode(line, type=NodeDump)
    except (*UNDECODABLE, ValueError) as error:
        raise DamagedFileError(f"the dump is damaged: {error}") from None
    if dump.distdiag_dump != VERSION:
        raise DamagedFileError(f"the dump has version {dump.distdiag_dump}, not {VERSION}")
    if not all(0 <= r.who.rank < r.who.world_size <= LARGEST_WORLD for r in dump.ranks):
        raise DamagedFileError("the dump is damaged: it has a rank that cannot be")
    return dump


def take_dump(
    ranks: Iterable[LiveRank], *, timeout_s: float, say: Callable[[str], None]
) -> NodeDump:
    """Return the stacks of these ranks of this node; `say` hears of each job in turn.

    Each job gets an equal share of `timeout_s`.
    """
    jobs: dict[str, list[LiveRank]] = {}
    for rank in ranks:
        jobs.setdefault(rank.job, []).append(rank)
    dumped: list[RankStacks] = []
    for job, members in jobs.items():
        phrase = RankSet(who.rank for who in members).phrase()
        say(f"job {job}: taking the stacks of {phrase} of {members[0].world_size}")
        source = PySpy(main_script(members[0].command, members[0].folder))
        pids = {who.rank: who.pid for who in members}
        by_rank = {who.rank: who for who in members}
        for stacks in dump_ranks(source, pids, timeout_s=timeout_s / len(jobs)):
            who = by_rank[stacks.rank]
            dumped.append(RankStacks(who=who, threads=stacks.threads, error=stacks.error))
    return NodeDump(hostname=platform.node(), ranks=tuple(dumped))


@dataclass(frozen=True, slots=True)
class JobDump:
    """The stacks of one job's ranks, over all nodes that were looked at."""

    job: str
    ranks: Mapping[int, RankStacks]
    repeated: RankSet = field(default_factory=RankSet)

    @property
    def world_size(self) -> int:
        """How many ranks the job has; some of them may run on other nodes."""
        return max(stacks.who.world_size for stacks in self.ranks.values())

    @property
    def absent(self) -> RankSet:
        """The ranks of the job that were found nowhere."""
        return RankSet(set(range(self.world_size)) - self.ranks.keys())

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes of the ranks that were found."""
        return tuple(sorted({stacks.who.hostname for stacks in self.ranks.values()}))

    def events(self) -> tuple[Stacks, ...]:
        """Return one event for each rank."""
        return tuple(stacks.event() for stacks in self.ranks.values())

    def tree(self) -> StackTree:
        """Return the stacks of all ranks as one tree."""
        return StackTree.from_stacks(self.events())


def jobs_of(dumps: Iterable[NodeDump]) -> tuple[JobDump, ...]:
    """Put the ranks of several nodes together, job by job.

    Where two nodes have the same rank of a job, the one that could be read counts, or the first.
    """
    jobs: dict[str, dict[int, RankStacks]] = {}
    repeated: dict[str, set[int]] = {}
    for dump in dumps:
        for stacks in dump.ranks:
            name, rank = stacks.who.job, stacks.who.rank
            ranks = jobs.setdefault(name, {})
            if rank in ranks:
                repeated.setdefault(name, set()).add(rank)
            if rank not in ranks or (ranks[rank].error and not stacks.error):
                ranks[rank] = stacks
    return tuple(
        JobDump(job, dict(sorted(jobs[job].items())), RankSet(repeated.get(job, ())))
        for job in sorted(jobs)
    )


# A folder of dumps, one file for each rank, for other tools and for a later look.

_UNSAFE: Final = re.compile(r"[^\w-]")


def prepare(folder: Path) -> None:
    """Make the folder before anything else is done.

    Raises:
        UsageError: it cannot be made, or holds something already.

    """
    try:
        make_private_folder(folder)
        if any(folder.iterdir()):
            raise UsageError(f"folder {folder} is not empty: dumps of two moments would mix")
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be written: {error.strerror}") from None


def save(jobs: Sequence[JobDump], folder: Path) -> int:
    """Write the stacks of each rank that has any; return the number of files.

    A file ``rank-3.py-spy.json`` has the form of ``py-spy dump --json``. Several jobs have a folder
    each. Files are readable by the owner only.

    Raises:
        UsageError: the folder cannot be written.

    """
    num_files = 0
    try:
        for job in jobs:
            place = folder / f"{JOB_PREFIX}{_UNSAFE.sub('_', job.job)}" if len(jobs) > 1 else folder
            make_private_folder(place)
            for rank, stacks in job.ranks.items():
                if stacks.threads:
                    threads = [_spy_thread(thread, stacks.who.pid) for thread in stacks.threads]
                    text = msgspec.json.format(msgspec.json.encode(threads), indent=2)
                    write_atomically(place / f"rank-{rank}.py-spy.json", text + b"\n")
                    num_files += 1
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be written: {error.strerror}") from None
    return num_files


def _spy_thread(thread: ThreadStack, pid: int) -> dict[str, object]:
    return {
        "pid": pid,
        "thread_id": None,
        "thread_name": thread.name,
        "os_thread_id": None,
        "active": thread.active,
        "owns_gil": thread.holds_gil,
        "frames": [
            {
                "name": frame.function,
                "filename": frame.file,
                "module": None,
                "short_filename": PurePath(frame.file).name,
                "line": frame.line,
                "locals": None,
            }
            for frame in thread.frames
        ],
        "process_info": None,
    }
