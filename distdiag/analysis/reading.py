"""Read many files of strangers, in processes that a hostile one may kill without harm."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Final

from distdiag.analysis.large_files import load
from distdiag.dumps.bystanders import HEAD_BYTES
from distdiag.dumps.files import Refused, dumps_of_stream, walk
from distdiag.dumps.flight_recorder.recording import RecordingDump
from distdiag.dumps.log_text import plain
from distdiag.dumps.logs.group_reports import ReportDump
from distdiag.dumps.reading import Dump, DumpReader, LargeFile, RankDump, load_readers
from distdiag.events.base import Event
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Raised
from distdiag.events.stacks import Stacks
from distdiag.findings.finding import ReadFile

MOST_MEMORY: Final = 8 << 30
"""So much address space may a process take that reads files, in bytes."""
MOST_CPU_S: Final = 120
"""So long may one file take."""
KINDS: Final = {
    "flight_recorder": "flight recorder",
    "launchers": "launcher's summary",
    "logs": "log",
    "nccl_ras": "NCCL RAS status",
    "stacks": "stacks",
}
"""What the readers of each folder of `distdiag.dumps` read, in words."""
STDIN: Final = "stdin"
"""How a report calls what came out of a pipe."""
AT_ONCE: Final = 4
"""So many files wait for each process: none is idle, and few are in memory."""


@dataclass(slots=True)
class Contents:
    """What files hold: dumps, one line for each that cannot be read, and names of foreign ones.

    `files` are those that were read, their ranks as far as the content says them. `passed_over`
    counts by kind what lies beside them and is no evidence.
    """

    dumps: list[RankDump] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    files: list[ReadFile] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)

    def add(self, other: Contents) -> None:
        """Append what another file holds."""
        self.dumps += other.dumps
        self.problems += other.problems
        self.foreign += other.foreign
        self.files += other.files


def read_files(
    paths: Sequence[Path],
    *,
    skip_folder: Callable[[Path], bool],
    progress: Callable[[int], None],
    stream: BinaryIO | None = None,
) -> Contents:
    """Read all files below the paths, members of archives included, and what comes out of a pipe.

    `progress` is told how many have been read. What they hold is in the order of their names.
    """
    contents = Contents()
    piped = () if stream is None else dumps_of_stream(stream, STDIN)
    entries = chain(piped, walk(paths, skip_folder=skip_folder, passed_over=contents.passed_over))
    # All processes of a pool are forked at once: of a few files no more are needed than files.
    first = list(islice(entries, len(os.sched_getaffinity(0))))
    if first:
        _readers()  # loaded here, they are there in all that is forked
    with _Pool(max(1, len(first))) as pool:
        for num_read, part in enumerate(_in_order(chain(first, entries), pool), 1):
            contents.add(part)
            progress(num_read)
    return contents


def read_dump(source: Dump | LargeFile) -> Contents:
    """Read one file with every reader that recognises it; this runs in a process of its own."""
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s) + MOST_CPU_S, hard))
    try:
        dump, remark = load(source) if isinstance(source, LargeFile) else (source, "")
    except OSError as error:
        assert isinstance(source, LargeFile)
        return Contents(problems=[f"{source.shown}: cannot be read: {error.strerror}"])
    dump = plain(dump)
    readers = [reader for reader in _readers() if reader.recognises(dump)]
    contents = Contents(foreign=[] if readers else [dump.path])
    kinds: dict[str, int] = {}
    for reader in readers:
        try:
            found = list(reader.read(dump))
        except DamagedFileError as error:
            contents.problems.append(str(error))
        except (MemoryError, RecursionError):
            contents.problems.append(f"{dump.path}: the {reader.name} reader gave it up: too large")
        else:
            contents.dumps += found
            if found:
                kind = _kind(reader)
                kinds[kind] = kinds.get(kind, 0) + sum(map(_num_entries, found))
    contents.files.append(_as_read(dump, kinds, contents.problems, remark))
    return contents


def _kind(reader: DumpReader) -> str:
    """Return what a reader reads: the name of the folder of `distdiag.dumps` that it is in."""
    folder = type(reader).__module__.split(".")[2:3]
    return KINDS.get(folder[0], folder[0]) if folder else "dump"


def _num_entries(dump: RankDump) -> int:
    """Return how many lines, or entries of a dump, say what was read."""
    if isinstance(dump, RecordingDump):
        return len(dump.recording.columns.states)
    if isinstance(dump, ReportDump):
        return max(len(dump.events), len(dump.reports))
    return sum(_num_lines_of(event) for event in dump.events)


def _num_lines_of(event: Event) -> int:
    match event:
        case Raised():
            return event.traceback.count("\n") + 1
        case Stacks():
            return sum(1 + len(thread.frames) for thread in event.threads)
        case _:
            return 1


def _as_read(dump: Dump, kinds: dict[str, int], problems: Sequence[str], remark: str) -> ReadFile:
    is_text = b"\0" not in dump.data[:HEAD_BYTES]
    num_lines = dump.data.count(b"\n") + (not dump.data.endswith(b"\n")) if is_text else 0
    why = "; ".join(problem.removeprefix(f"{dump.path}: ") for problem in problems)
    if not kinds and not why:
        why = "nothing in it is of a kind that is known" if dump.data else "it is empty"
    if dump.is_cut:
        remark = "only its end was read"
    why = "; ".join(filter(None, [remark, why]))
    num_understood = sum(kinds.values())
    return ReadFile(
        path=dump.path,
        kinds=tuple(kinds),
        num_lines=num_lines,
        # One line may tell several readers something.
        num_understood=min(num_understood, num_lines) if num_lines else num_understood,
        problem=why,
    )


@lru_cache(maxsize=1)
def _readers() -> tuple[DumpReader, ...]:
    return load_readers()


def _in_order(entries: Iterator[Dump | LargeFile | Refused], pool: _Pool) -> Iterator[Contents]:
    pending: deque[Contents | tuple[Dump | LargeFile, Future[Contents]]] = deque()
    for entry in entries:
        if isinstance(entry, Refused):
            pending.append(Contents(problems=[str(entry)]))
        else:
            pending.append((entry, pool.submit(entry)))
        while len(pending) > pool.size * AT_ONCE:
            yield pool.result(pending.popleft())
    while pending:
        yield pool.result(pending.popleft())


class _Pool:
    """Processes that read files. When one dies, the files it may have died of are read alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = _processes(size)

    def submit(self, dump: Dump | LargeFile) -> Future[Contents]:
        try:
            return self._pool.submit(read_dump, dump)
        except BrokenProcessPool:
            # Its thread must have ended: no process is forked while there is another thread.
            self._pool.shutdown()
            self._pool = _processes(self.size)
            return self._pool.submit(read_dump, dump)

    def result(self, item: Contents | tuple[Dump | LargeFile, Future[Contents]]) -> Contents:
        if isinstance(item, Contents):
            return item
        dump, future = item
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            self._pool.shutdown()
            error, future = self._alone(dump)
        if error is None:
            return future.result()
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, BrokenProcessPool):
            reason = "it took too much memory or time, and the process that read it was ended"
        path = dump.shown if isinstance(dump, LargeFile) else dump.path
        return Contents(problems=[f"{path}: cannot be read: {reason}"])

    def _alone(self, dump: Dump | LargeFile) -> tuple[BaseException | None, Future[Contents]]:
        with _processes(1) as pool:
            future = pool.submit(read_dump, dump)
            return future.exception(), future

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _processes(num: int) -> ProcessPoolExecutor:
    # Forking is cheap, and safe since nothing here has begun a thread yet: the executor starts all
    # its processes before its own.
    return ProcessPoolExecutor(
        num, mp_context=multiprocessing.get_context("fork"), initializer=_begin_reading
    )


def _begin_reading() -> None:
    """Set the limits of a process that reads files; it lives too short to collect garbage."""
    gc.disable()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
