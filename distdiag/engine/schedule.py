"""Decide whose events can be replayed next, and when it is known that a wait is in vain."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from distdiag.engine.gate import Gate
from distdiag.engine.replay import Replay
from distdiag.engine.timed_access import TimedAccess
from distdiag.event import Event
from distdiag.ranks import RankSet

NEVER: Final = 1 << 63
IDLE_NS: Final = 30_000_000_000
"""From a rank of which nothing came for so long nothing earlier will come."""
MOST_QUEUED: Final = 1_000_000

Step = Callable[[Replay, Any], Gate | None]
"""Replays one event of a rank, or returns what it has to wait for first."""


class Schedule:
    """The replays of all ranks.

    `horizon_ns` is the time up to which everything has come; who needs it to be later waits at
    `horizon`. Who needs the next event of its own rank waits at `own_next`. `is_ending` says that
    nothing more comes; `is_over` that besides all waits that are left are in vain.

    `woken` are the ranks that should look again; `has_absent` says that some cannot come any more.
    `doubted_ns` is the time from which on an order may have been missed. `problem` says why
    nothing is replayed any more.
    """

    def __init__(self, world: RankSet) -> None:
        """Replay these ranks."""
        self.replays = {rank: Replay(rank) for rank in world}
        self.horizon_ns = -1
        self.horizon, self.own_next = Gate(), Gate()
        self.is_ending = self.is_over = self.has_absent = False
        self.doubted_ns = NEVER
        self.problem = ""
        self._doubted_files: dict[int, int] = {}
        self.woken: deque[int] = deque()
        self._num_queued = 0

    # The replay

    def take(self, replay: Replay, event: Event, step: Step) -> bool:
        """Replay an event at once if nothing before it waits; return whether that was possible."""
        if replay.gate is not None:
            return False
        gate = step(replay, event)
        if gate is None:
            replay.num_done += 1
        else:
            replay.queue.append(event)
            self._num_queued += 1
            replay.gate = gate
            gate.waiters.append(replay.rank)
        return True

    def enqueue(self, replay: Replay, item: Any, steps: Mapping[type, Step]) -> None:  # noqa: ANN401
        """Take in what is to be replayed for a rank, and replay what can be."""
        if self.problem:
            return
        replay.queue.append(item)
        self._num_queued += 1
        if replay.gate is None or replay.gate is self.own_next:
            self.woken.append(replay.rank)
        if self.woken:
            self.go_on(steps)
        if self._num_queued > MOST_QUEUED:
            self._give_up()

    def go_on(self, steps: Mapping[type, Step]) -> None:
        """Replay all that can be."""
        while self.woken:
            replay = self.replays[self.woken.popleft()]
            was_waiting = replay.gate is not None
            replay.gate = None
            self._replay(replay, steps)
            if was_waiting and replay.is_gone:
                self.reconsider()

    def _replay(self, replay: Replay, steps: Mapping[type, Step]) -> None:
        queue = replay.queue
        while queue:
            item = queue[0]
            gate = steps[type(item)](replay, item)
            if gate is not None:
                replay.gate = gate
                if gate is not self.own_next:
                    gate.waiters.append(replay.rank)
                return
            queue.popleft()
            replay.num_done += 1
            self._num_queued -= 1

    def wake(self, gate: Gate) -> None:
        """Let those look again who wait at this gate."""
        if gate.waiters:
            self.woken += gate.waiters
            gate.waiters = []

    def reconsider(self) -> None:
        """Let all who wait look again whether they still have to."""
        self.woken += [rank for rank, replay in self.replays.items() if replay.gate is not None]

    def _give_up(self) -> None:
        silent = RankSet(rank for rank, replay in self.replays.items() if not replay.queue)
        self.problem = (
            "the order of accesses to files could not be followed: too many events wait for "
            f"records of {silent.phrase()}"
        )
        for replay in self.replays.values():
            replay.queue.clear()

    # Time

    def advance(self, now_ns: int, unseen: Collection[int]) -> None:
        """Let time pass; nothing can be heard now of the ranks in `unseen`."""
        heard_ns = [
            replay.fed_ns if rank in unseen else max(replay.fed_ns, now_ns - IDLE_NS)
            for rank, replay in self.replays.items()
            if not replay.has_left
        ]
        self.horizon_ns = max(self.horizon_ns, min(heard_ns, default=NEVER))
        for replay in self.replays.values():
            replay.sure_ns = replay.fed_ns
        self.wake(self.horizon)

    def end(self, steps: Mapping[type, Step]) -> None:
        """Nothing more comes: replay what waits in vain as if it had been satisfied."""
        self.horizon_ns, self.is_ending = NEVER, True
        self.reconsider()
        self.go_on(steps)
        self.is_over = self.has_absent = True
        self.reconsider()
        self.go_on(steps)

    def may_go_on(self, awaited: Iterable[int], time_ns: int) -> bool:
        """Whether these ranks cannot come any more; if so, what is ordered from now on is not sure.

        `time_ns` is when the wait began.
        """
        if not (self.is_over or all(self.replays[rank].is_gone for rank in awaited)):
            return False
        self.doubt(time_ns)
        return True

    def leave(self, replay: Replay) -> None:
        """Note that a rank has come to its end."""
        replay.has_left = self.has_absent = True
        self.reconsider()

    # Doubt

    def doubt(self, since_ns: int) -> None:
        """From this time on, do not believe that accesses are not ordered."""
        self.doubted_ns = min(self.doubted_ns, since_ns)

    def doubt_rank(self, replay: Replay, since_ns: int, *, is_order: bool) -> None:
        """Note that not all accesses of a rank are recorded any more, or not all its waits.

        That was noticed at `since_ns`. It may have begun after the last look before that.
        """
        since_ns = min(since_ns, replay.sure_ns)
        if is_order:
            replay.is_incomplete = self.has_absent = True
            self.doubt(since_ns)
            self.reconsider()
        before_ns = self._doubted_files.get(replay.rank, NEVER)
        self._doubted_files[replay.rank] = min(before_ns, since_ns)

    def is_doubtful(self, *accesses: TimedAccess) -> bool:
        """Whether these may be ordered in a way that was not seen."""
        last_ns = max(access.time_ns for access in accesses)
        since_ns = [self._doubted_files.get(access.rank, NEVER) for access in accesses]
        return last_ns >= min(self.doubted_ns, *since_ns)
