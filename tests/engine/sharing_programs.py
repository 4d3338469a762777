"""Random programs of ranks that order themselves by locks and by polling for files.

What happens in these depends on who is faster. So it is not compared with the clocks pair by pair:
no pair may be reported that cannot happen at the same moment in any interleaving.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.engine.programs import Access, Program, Step
from tests.engine.programs import record as record_step
from tests.engine.traces import Trace

LOCKS = ("flock", "polled-flock", "exclusive")
POLLS = ("test", "read", "list", "gone")


@dataclass
class SharingProgram(Program):
    """Steps of ranks that may hold locks (``got`` to ``release``) and wait for files (``hit``)."""

    made: dict[str, Access] = field(default_factory=dict)

    def can_go(self, rank: int, counts: tuple[int, ...]) -> bool:
        step = self.steps[rank][counts[rank]]
        if step.kind == "got":
            return not self.is_held(step.key, rank, counts)
        if step.kind == "hit":
            return self.is_there(step.key, counts)
        return super().can_go(rank, counts)

    def is_held(self, key: str, rank: int, counts: tuple[int, ...]) -> bool:
        return any(
            sum(
                {"got": 1, "release": -1}.get(step.kind, 0)
                for step in steps[:count]
                if step.key == key
            )
            for other, (steps, count) in enumerate(zip(self.steps, counts, strict=True))
            if other != rank
        )

    def is_there(self, key: str, counts: tuple[int, ...]) -> bool:
        """Whether what somebody polls for has happened."""
        made = self.made[key]
        done = self.steps[made.rank][: counts[made.rank]]
        return any(step.access is made for step in done)

    def can_meet(self) -> set[frozenset[int]]:
        """Return the pairs of lines that are next, or under way, at the same moment."""
        pairs = set()
        for counts in self.states():
            active = [
                access
                for rank, count in enumerate(counts)
                for access in self._active(self.steps[rank], count)
            ]
            pairs |= {
                frozenset((one.line, other.line))
                for one in active
                for other in active
                if one.rank != other.rank
            }
        return pairs

    @staticmethod
    def _active(steps: list[Step], count: int) -> list[Access]:
        ended = [id(step.access) for step in steps[:count] if step.kind == "end"]
        begun = [step.access for step in steps[:count] if step.kind == "begin"]
        active = [access for access in begun if id(access) not in ended]
        following = steps[count] if count < len(steps) else None
        if following is not None and following.access and following.kind in ("begin", "access"):
            active.append(following.access)
        return active

    def record(self, trace: Trace, rank: int, counts: tuple[int, ...]) -> None:
        step = self.steps[rank][counts[rank]]
        path, line = f"/d/{step.key}", 900 + rank
        kind = step.key.partition("-")[0]
        if step.kind in ("try", "got"):
            is_try = step.kind == "try"
            if kind == "flock" and is_try:
                trace.access(rank, "lock", path, line)
            elif kind != "flock" and is_try is self.is_held(step.key, rank, counts):
                exclusive = {"is_exclusive": True} if kind == "exclusive" else {}
                trace.access(rank, "write" if exclusive else "lock", path, line, **exclusive)
        elif step.kind == "release":
            trace.access(rank, "remove" if kind == "exclusive" else "unlock", path, line)
        elif step.kind in ("miss", "hit"):
            is_there = self.is_there(step.key, counts)
            # Only a failure before it tells that reading is a way of waiting.
            if kind in ("read", "list") or is_there is (step.kind == "hit"):
                self._poll(trace, rank, step, path, is_there=is_there)
        else:
            record_step(trace, rank, step)

    def _poll(self, trace: Trace, rank: int, step: Step, path: str, *, is_there: bool) -> None:
        kind = step.key.partition("-")[0]
        if kind == "read":
            read = trace.access(rank, "read", path, 800 + rank)
            if step.kind == "miss":
                trace.close(read, error="FileNotFoundError")
        elif kind == "list":
            trace.access(rank, "list", path.rpartition("/")[0], 800 + rank)
        else:
            trace.access(rank, "test", path, 800 + rank, found=is_there is (kind == "test"))


class SharingWriter:
    """Makes up such a program."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.num_ranks = self.chance.choice((2, 2, 3))
        self.program = SharingProgram([[] for _ in range(self.num_ranks)])
        self.num_polls = 0

    def write(self) -> SharingProgram:
        for _ in range(self.chance.randint(3, 7)):
            self.chance.choice((self.access, self.section, self.section, self.poll))()
        return self.program

    def access(self, rank: int | None = None, path: str = "", action: str = "") -> Access:
        rank = self.chance.randrange(self.num_ranks) if rank is None else rank
        action = action or self.chance.choice(("read", "write", "write", "rename", "remove"))
        origin = f"/d/tmp{rank}" if action == "rename" else ""
        line = len(self.program.accesses) + 1
        access = Access(rank, action, path or self.chance.choice(("/d/a", "/d/b")), line, origin)
        access.takes_time = action == "write" and self.chance.random() < 0.6
        self.program.accesses.append(access)
        kinds = ("begin", "end") if access.takes_time else ("access",)
        self.program.steps[rank] += [Step(kind, access=access) for kind in kinds]
        return access

    def section(self) -> None:
        rank = self.chance.randrange(self.num_ranks)
        key = self.chance.choice(LOCKS)
        for kind in ("try", "got") if self.chance.random() < 0.8 else ("try", "try", "got"):
            self.program.steps[rank].append(Step(kind, key=key))
        for _ in range(self.chance.randint(1, 2)):
            self.access(rank)
        self.program.steps[rank].append(Step("release", key=key))

    def poll(self) -> None:
        maker, *others = self.chance.sample(range(self.num_ranks), self.num_ranks)
        kind = self.chance.choice(POLLS)
        key = f"{kind}-{self.num_polls}"
        self.num_polls += 1
        action = {"read": "rename", "gone": "remove"}.get(kind) or self.chance.choice(
            ("write", "rename")
        )
        self.program.made[key] = self.access(maker, f"/d/{key}", action)
        for rank in others[: self.chance.randint(1, len(others))]:
            misses = [Step("miss", key=key)] * self.chance.randint(1, 2)
            self.program.steps[rank] += [*misses, Step("hit", key=key)]
