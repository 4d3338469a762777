"""What the readers of stacks in text share: limits, and the event that they make."""

from collections.abc import Iterable
from typing import Final

from distdiag.dumps.reading import UNKNOWN_RANK, is_foreign_user_file
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
