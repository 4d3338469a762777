"""What the descendants of processes have used of the processor, and what was read and written."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from distdiag.dumps.process.proc import ProcessState, all_pids, proc_text, read_process

LOOK_EVERY_S: Final = 1.0
"""Reading the table of all processes takes a few milliseconds for each hundred of them."""

_BYTES: Final = ("rchar", "wchar", "read_bytes")
"""By system calls, and from disks also by page faults, such as those of a library's code."""


class FamilyUse(NamedTuple):
    """What a process and its descendants have used so far.

    `children_cpu_s` is the processor time of the descendants in seconds, those included that have
    ended and were waited for; `num_children` counts those that live; `io_bytes` is what all have
    read and written.
    """

    children_cpu_s: float = 0.0
    num_children: int = 0
    io_bytes: int = 0


class ProcessTree:
    """Looks at the descendants of some processes, of all at once and not too often."""

    def __init__(
        self,
        roots: Callable[[], Iterable[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`roots` returns the pids; a root below another one is not a part of its family."""
        self._roots = roots
        self._clock = clock
        self._looked_s = float("-inf")
        self._use: dict[int, FamilyUse] = {}

    def use_of(self, pid: int) -> FamilyUse:
        """Return what the family of one of the processes has used, not more than a second ago."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._use = _look(set(self._roots()))
        return self._use.get(pid, FamilyUse())


def _look(roots: set[int]) -> dict[int, FamilyUse]:
    table = {pid: state for pid in all_pids() if (state := _read(pid)) is not None}
    children: dict[int, list[int]] = {}
    for pid, state in table.items():
        children.setdefault(state.parent_pid, []).append(pid)
    # This process looks after a rank, and may be its child.
    left_out = {*roots, os.getpid()}
    return {
        root: _use(table, root, list(_below(root, children, left_out)))
        for root in roots & table.keys()
    }


def _read(pid: int) -> ProcessState | None:
    try:
        return read_process(pid)
    except OSError:  # the processes of other users may be hidden from us
        return None


def _below(pid: int, children: Mapping[int, list[int]], left_out: set[int]) -> Iterator[int]:
    for child in children.get(pid, ()):
        if child not in left_out:
            yield child
            yield from _below(child, children, left_out)


def _use(table: Mapping[int, ProcessState], pid: int, descendants: list[int]) -> FamilyUse:
    used = (table[child].cpu_s + table[child].reaped_cpu_s for child in descendants)
    return FamilyUse(
        children_cpu_s=table[pid].reaped_cpu_s + sum(used),
        num_children=len(descendants),
        io_bytes=sum(map(_io_bytes, (pid, *descendants))),
    )


def _io_bytes(pid: int) -> int:
    lines = (line.partition(": ") for line in proc_text(pid, "io").splitlines())
    return sum(int(value) for name, _, value in lines if name in _BYTES)
