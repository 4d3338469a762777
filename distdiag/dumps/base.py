"""The contracts of what looks at ranks from outside, and how it looks at several at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final

from distdiag.events.base import Value
from distdiag.events.stacks import Observed, ProcessSeen, Stacks, ThreadStack
from distdiag.record.guard import Guard

AT_ONCE: Final = 8
"""So many ranks are dumped at the same time."""

_Job = tuple["DumpSource", Mapping[int, int]]


class StackSource:
    """A way to see the stacks of a process. It raises nothing: `Stacks.error` tells a failure."""

    name: ClassVar[str]
    is_native: ClassVar[bool] = False
    """Whether it sees frames of C and C++, too."""

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
            is_native=self.is_native,
        )


class DumpSource:
    """Something outside of the ranks' processes that shows what they do.

    It raises nothing: `Observed.error` tells a failure.
    """

    name: ClassVar[str]

    def observe(self, pids: Mapping[int, int], timeout_s: float) -> tuple[Observed, ...]:
        """Look at the ranks, given by rank and pid, within `timeout_s` altogether."""
        raise NotImplementedError

    def observed(
        self,
        rank: int,
        summary: str = "",
        values: Mapping[str, Value] | None = None,
        *,
        processes: Iterable[ProcessSeen] = (),
        error: str = "",
    ) -> Observed:
        """Build the event: it is the monitor's, so it has no number among the rank's own."""
        return Observed(
            rank=rank,
            seq=-1,
            time_ns=time.monotonic_ns(),
            source=self.name,
            summary=summary,
            values=dict(values or {}),
            processes=tuple(processes),
            error=error,
        )

    def failed(self, pids: Mapping[int, int], error: str) -> tuple[Observed, ...]:
        """Say of each of the ranks why nothing is known."""
        return tuple(self.observed(rank, error=error) for rank in pids)


class RankDumpSource(DumpSource):
    """A source that looks at one rank at a time, so that one that is stuck hides no other."""

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Look at one rank, within `timeout_s`."""
        raise NotImplementedError

    def observe(self, pids: Mapping[int, int], timeout_s: float) -> tuple[Observed, ...]:
        """Look at the ranks, one after the other."""
        share = timeout_s / max(1, len(pids))
        return tuple(self.observe_rank(rank, pid, share) for rank, pid in pids.items())


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


def observe_all(
    sources: Sequence[DumpSource], pids: Mapping[int, int], *, timeout_s: float
) -> tuple[Observed, ...]:
    """Return what all sources show of all ranks, given by rank and pid, within `timeout_s`.

    Looking at a stuck process may itself get stuck, in the kernel or in a driver: a source that
    has not answered in time is left behind, and the others are used.
    """
    jobs = [job for source in sources for job in _jobs(source, pids)]
    waiting: queue.SimpleQueue[tuple[int, _Job]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, tuple[Observed, ...]]] = queue.SimpleQueue()
    for numbered in enumerate(jobs):
        waiting.put(numbered)
    deadline = time.monotonic() + timeout_s
    for number in range(min(len(jobs), len(sources) * AT_ONCE)):
        # Daemons: one that is left behind must not keep the monitor from ending.
        threading.Thread(
            target=_work, args=(waiting, answers, deadline), name=f"dump-{number}", daemon=True
        ).start()
    heard = _collect(answers, len(jobs), deadline)
    late = f"no answer within {timeout_s:.3g} s"
    return tuple(
        event
        for number, (source, ranks) in enumerate(jobs)
        for event in (heard[number] if number in heard else source.failed(ranks, late))
    )


def _jobs(source: DumpSource, pids: Mapping[int, int]) -> Iterable[_Job]:
    if isinstance(source, RankDumpSource):
        return [(source, {rank: pid}) for rank, pid in pids.items()]
    return [(source, pids)] if pids else []


def _work(
    waiting: queue.SimpleQueue[tuple[int, _Job]],
    answers: queue.SimpleQueue[tuple[int, tuple[Observed, ...]]],
    deadline: float,
) -> None:
    while (left := deadline - time.monotonic()) > 0:
        try:
            number, (source, ranks) = waiting.get_nowait()
        except queue.Empty:
            return
        failures: list[Exception] = []
        with Guard(failures.append):  # one source must not silence the others
            answers.put((number, source.observe(ranks, left)))
        for error in failures:
            reason = f"{type(error).__name__}: {error}"
            answers.put((number, source.failed(ranks, reason)))


def _collect(
    answers: queue.SimpleQueue[tuple[int, tuple[Observed, ...]]], expected: int, deadline: float
) -> dict[int, tuple[Observed, ...]]:
    heard: dict[int, tuple[Observed, ...]] = {}
    while len(heard) < expected:
        try:
            number, events = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        heard[number] = events
    return heard
