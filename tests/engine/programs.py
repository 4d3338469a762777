"""Small random programs of several ranks, and what can happen in them: all interleavings, by force.

Nothing here knows of clocks. A rank is a list of steps; a step that waits can be taken when the
steps that others have taken satisfy it. `unordered` looks at every state that can be reached.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property

from tests.engine.traces import Trace

FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")
MOST_STATES = 20_000


class TooManyStatesError(Exception):
    """A program is too large to be explored."""


@dataclass
class Call:
    """One call as one rank makes it. `number` counts the calls of its rank on the same `lane`."""

    lane: tuple
    number: int
    op: str = ""
    members: tuple[int, ...] = ()
    root: int | None = None
    backend: str = "gloo"
    api: str | None = "call"
    is_async: bool = False
    peer: int | None = None
    splits: tuple[int, ...] = ()
    event: object = None

    @property
    def is_on_stream(self) -> bool:
        """Whether waiting for it keeps only the device."""
        return self.backend == "nccl" and self.op not in ("barrier", "create", "monitored_barrier")


@dataclass
class Access:
    """One access; `line` tells it from others."""

    rank: int
    action: str
    path: str
    line: int
    origin: str = ""
    takes_time: bool = False
    event: object = None


@dataclass
class Step:
    """One thing that a rank does at once."""

    kind: str
    call: Call | None = None
    access: Access | None = None
    key: str = ""


@dataclass
class Program:
    """The steps of every rank."""

    steps: list[list[Step]]
    accesses: list[Access] = field(default_factory=list)

    # What can happen

    def can_go(self, rank: int, counts: tuple[int, ...]) -> bool:
        """Whether a rank can take its next step after each has taken so many."""
        step = self.steps[rank][counts[rank]]
        if step.kind in ("wait", "native-wait"):
            return self._is_over(rank, step.call, counts)
        if step.kind == "sync" or (step.kind == "issue" and step.call.is_on_stream):
            # Calls on streams run one after the other; their hosts count as that far.
            issued = [s.call for s in self.steps[rank][: counts[rank]] if s.kind == "issue"]
            return all(self._is_over(rank, call, counts) for call in issued if call.is_on_stream)
        if step.kind == "get":
            return any(
                self._has_done(other, ("set", step.key), counts) for other in range(len(counts))
            )
        return True

    def _is_over(self, rank: int, call: Call, counts: tuple[int, ...]) -> bool:
        if call.op == "recv":
            return self._has_issued(call.peer, call, counts)
        if call.op == "send":
            return True
        if call.op == "create" and call.backend != "gloo":
            return True
        if call.op in FROM_ROOT:
            return self._has_issued(call.root, call, counts)
        if call.op in TO_ROOT and rank != call.root:
            return True
        senders = call.members
        if call.splits:
            senders = [m for m, rows in zip(call.members, call.splits, strict=True) if rows]
        return all(self._has_issued(member, call, counts) for member in senders)

    def _has_issued(self, rank: int, call: Call, counts: tuple[int, ...]) -> bool:
        wanted = "send" if call.op == "recv" else call.op
        return self._has_done(rank, (wanted, call.lane, call.number), counts)

    def _has_done(self, rank: int, what: tuple, counts: tuple[int, ...]) -> bool:
        return self._places[rank].get(what, MOST_STATES) < counts[rank]

    @cached_property
    def _places(self) -> list[dict[tuple, int]]:
        """By rank, the number of the step that issues a call or sets a key."""
        places: list[dict[tuple, int]] = []
        for steps in self.steps:
            places.append({})
            for number, step in enumerate(steps):
                if step.kind == "issue":
                    places[-1][step.call.op, step.call.lane, step.call.number] = number
                elif step.kind == "set":
                    places[-1]["set", step.key] = number
        return places

    def states(self) -> set[tuple[int, ...]]:
        """Return how many steps the ranks can have taken at any one time."""
        start = (0,) * len(self.steps)
        seen, pending = {start}, [start]
        while pending:
            counts = pending.pop()
            for rank, count in enumerate(counts):
                if count < len(self.steps[rank]) and self.can_go(rank, counts):
                    after = (*counts[:rank], count + 1, *counts[rank + 1 :])
                    if after not in seen:
                        seen.add(after)
                        pending.append(after)
            if len(seen) > MOST_STATES:
                raise TooManyStatesError
        return seen

    def unordered(self) -> set[frozenset[int]]:
        """Return the pairs of accesses (by index) of which neither is always over before the other.

        Each can have begun while the other was not over yet.
        """
        begun, ended = self._bits("begin"), self._bits("end")
        not_over = [0] * len(self.accesses)
        for counts in self.states():
            has_begun = has_ended = 0
            for rank, count in enumerate(counts):
                has_begun |= begun[rank][count]
                has_ended |= ended[rank][count]
            for index in range(len(self.accesses)):
                if has_begun >> index & 1:
                    not_over[index] |= ~has_ended
        return {
            frozenset((one, other))
            for one in range(len(self.accesses))
            for other in range(one)
            if self.accesses[one].rank != self.accesses[other].rank
            and not_over[one] >> other & 1
            and not_over[other] >> one & 1
        }

    def _bits(self, kind: str) -> list[list[int]]:
        """Return by rank and number of steps which accesses have begun, or ended, as bits."""
        table = []
        for steps in self.steps:
            row = [0]
            for step in steps:
                is_it = step.kind == kind or step.kind == "access"
                row.append(row[-1] | (1 << self.accesses.index(step.access) if is_it else 0))
            table.append(row)
        return table

    # What did happen

    def run(self, chance: random.Random) -> Trace:
        """Run the program once, until all ranks are at their end or wait in vain."""
        trace = Trace(len(self.steps))
        counts = [0] * len(self.steps)
        while True:
            able = [
                rank
                for rank, steps in enumerate(self.steps)
                if counts[rank] < len(steps) and self.can_go(rank, tuple(counts))
            ]
            if not able:
                return trace
            rank = chance.choice(able)
            self.record(trace, rank, tuple(counts))
            counts[rank] += 1

    def record(self, trace: Trace, rank: int, counts: tuple[int, ...]) -> None:
        """Write down what probes would write down of the next step of a rank."""
        record(trace, rank, self.steps[rank][counts[rank]])


def record(trace: Trace, rank: int, step: Step) -> None:
    """Write down what probes would write down of one step."""
    call, access = step.call, step.access
    if step.kind == "issue" and call.op == "create":
        trace.creates(rank, done=False, backend=call.backend)
    elif step.kind == "issue":
        call.event = trace.issue(
            rank,
            call.op,
            call.members,
            backend=call.backend,
            is_async=call.is_async,
            api=call.api,
            root=call.root,
            peer=call.peer,
            output_splits=call.splits,
        )
    elif step.kind in ("wait", "waited") and call.op == "create":
        trace.creates(rank, done=True, backend=call.backend)
    elif step.kind in ("wait", "waited"):
        trace.wait(call.event)
    elif step.kind == "sync":
        trace.syncs(rank)
    elif step.kind == "set":
        trace.store(rank, "set", step.key, "v")
    elif step.kind == "get":
        trace.store(rank, "get", step.key, "v", done=True)
    elif step.kind in ("begin", "access"):
        access.event = trace.access(
            rank,
            access.action,
            access.path,
            access.line,
            origin=access.origin,
            has_end=access.takes_time,
        )
    elif step.kind == "end":
        trace.close(access.event)
