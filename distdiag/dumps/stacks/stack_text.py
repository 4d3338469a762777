"""What the readers of stacks share: limits, the event that they make, and whose it is."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from distdiag.dumps.reading import UNKNOWN_RANK, RankDump, is_foreign_user_file
from distdiag.events.base import Frame
from distdiag.events.stacks import Stacks, ThreadStack

MAIN_THREAD: Final = "MainThread"
MOST_THREADS: Final = 4096
MOST_FRAMES: Final = 300
MOST_DUMPS: Final = 1000
"""So many dumps are read of one file; a watchdog may have written one every minute."""

_BIG: Final = 1 << 31


def line_number(text: str | None) -> int:
    """Return the number of a line, 0 where there is none or it cannot be one."""
    if not text or not text.isdecimal() or len(text) > 10:
        return 0
    return min(int(text), _BIG)


def python_frame(file: str, line: str | None, function: str) -> Frame:
    """Return the frame of a Python function, whose last name is kept as tracebacks have it."""
    name = function.rpartition(".")[2] or function
    return Frame(file, line_number(line), name, is_foreign_user_file(file))


def stacks_event(
    rank: int | None, source: str, threads: Iterable[ThreadStack], *, error: str = ""
) -> Stacks:
    """Return the event of one dump, the main thread first."""
    ordered = sorted(threads, key=lambda thread: thread.name != MAIN_THREAD)
    return Stacks(
        rank=UNKNOWN_RANK if rank is None else rank,
        seq=-1,
        time_ns=0,
        source=source,
        threads=tuple(ordered[:MOST_THREADS]),
        error=error,
    )


# Which of the processes in a file are ranks, and what those are called whose rank nothing tells.

# The stack of a process that works for a rank, or starts ranks: end of a file, and a function.
_HELPERS: Final = (
    ("torch/utils/data/_utils/worker.py", "_worker_loop", "a worker of a data loader"),
    ("torch/_inductor/compile_worker/__main__.py", "main", "a worker of the compiler"),
    ("torch/_inductor/compile_worker/subproc_pool.py", "main", "a worker of the compiler"),
    ("torch/distributed/elastic/agent/server/api.py", "run", "the launcher"),
    ("torch/distributed/launcher/api.py", "launch_agent", "the launcher"),
    ("torch/multiprocessing/spawn.py", "start_processes", "the process that starts the ranks"),
    ("torch/multiprocessing/spawn.py", "join", "the process that starts the ranks"),
    ("multiprocessing/resource_tracker.py", "main", "the tracker of shared memory"),
    ("multiprocessing/forkserver.py", "main", "a server of processes"),
    ("multiprocessing/managers.py", "serve_forever", "a server of shared values"),
    ("concurrent/futures/process.py", "_process_worker", "a worker of a pool"),
    ("multiprocessing/pool.py", "worker", "a worker of a pool"),
)
# ``sglang::scheduler_TP3``, ``VLLM::Worker_DP0_TP1``, ``ray::RankWorker``: the part that differs.
_PLACE_IN_TITLE: Final = re.compile(r"(?<![A-Za-z0-9])(?:(?:TP|DP|PP|EP|CP|SP)\d{1,6}_?){1,6}\b")


class DumpedProcess(NamedTuple):
    """One process of a file: `title` is its command line, where the file has it."""

    threads: tuple[ThreadStack, ...]
    pid: int | None = None
    title: str = ""
    rank: int | None = None
    local_rank: int | None = None


def rank_dumps(processes: Iterable[DumpedProcess], path: str, source: str) -> Iterator[RankDump]:
    """Yield the stacks of each process; those of helpers are told as an error, or left out.

    The processes of one file that a launcher or a server printed are ranks and helpers. Helpers
    are known by their stacks, and where some titles have a place such as ``TP3``, by the lack of
    it. Beside a rank a helper is left out.
    """
    found = list(processes)
    helpers = [_helper(process.threads) for process in found]
    if sum(bool(_PLACE_IN_TITLE.search(process.title)) for process in found) > 1:
        helpers = [
            helper or ("" if _PLACE_IN_TITLE.search(process.title) else "a helper of the server")
            for process, helper in zip(found, helpers, strict=True)
        ]
    names = _labels(found, path)
    for process, helper, label in zip(found, helpers, names, strict=True):
        if helper and not all(helpers):
            continue
        error = f"it is {helper}, and no rank" if helper else ""
        yield RankDump(
            rank=process.rank,
            local_rank=process.local_rank,
            events=(stacks_event(process.rank, source, process.threads, error=error),),
            path=path,
            source=source,
            pid=process.pid,
            label=label,
        )


def _helper(threads: Sequence[ThreadStack]) -> str:
    """Return what a process is that is no rank, by its main thread; empty if it may be one."""
    main = next((thread for thread in threads if thread.name == MAIN_THREAD), None)
    for frame in main.frames if main is not None else ():
        file = frame.file.replace("\\", "/")
        for end, function, helper in _HELPERS:
            if frame.function == function and file.endswith(end):
                return helper
    return ""


def _labels(processes: Sequence[DumpedProcess], path: str) -> Iterator[str]:
    """Yield what each process is called: by its title, else its number, else the file."""
    places = [_PLACE_IN_TITLE.search(process.title) for process in processes]
    placed = [match[0] for match in places if match]
    is_telling = len(set(placed)) == len(placed)
    file = posixpath.basename(path.replace("!", "/"))
    for number, (process, place) in enumerate(zip(processes, places, strict=True), 1):
        if place is not None and is_telling:
            yield place[0]
        elif process.pid is not None:
            yield f"{place[0]} (pid {process.pid})" if place is not None else f"pid {process.pid}"
        else:
            yield file if len(processes) == 1 else f"process {number} in {file}"
