"""The contract of a source of stacks, and how the stacks of several ranks are taken at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final

from distdiag.event import Stacks, ThreadStack

AT_ONCE: Final = 8
"""So many ranks are dumped at the same time."""


class StackSource:
    """A way to see the stacks of a process. It raises nothing: `Stacks.error` tells a failure."""

    name: ClassVar[str]

    def dump(self, pid: int, rank: int, timeout_s: float) -> Stacks:
        """Return the stacks of all threads of a rank's process, within `timeout_s`."""
        raise NotImplementedError

    def stacks(
        self, rank: int, threads: tuple[ThreadStack, ...] = (), *, error: str = ""
    ) -> Stacks:
        """Build the event: it is the monitor's, so it has no number among the rank's own."""
        return Stacks(
            rank=rank,
            seq=-1,
            time_ns=time.monotonic_ns(),
            source=self.name,
            threads=threads,
            error=error,
        )


def dump_ranks(
    source: StackSource, pids: Mapping[int, int], *, timeout_s: float
) -> tuple[Stacks, ...]:
    """Return the stacks of several ranks, given by rank and pid, all within `timeout_s`."""
    if not pids:
        return ()
    rounds = -(-len(pids) // AT_ONCE)
    with ThreadPoolExecutor(min(AT_ONCE, len(pids)), thread_name_prefix="dump") as pool:
        dumps = [
            pool.submit(source.dump, pid, rank, timeout_s / rounds) for rank, pid in pids.items()
        ]
        return tuple(dump.result() for dump in dumps)
