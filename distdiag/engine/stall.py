"""When a job counts as standing still, and the steps from there to a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from distdiag.alignment import RankState
from distdiag.engine.waits import stalled

MIN_THRESHOLD_S: Final = 30.0
STEPS_OF_PATIENCE: Final = 10
SAME_CALL_PATIENCE: Final = 4
"""Ranks that are all in their calls may set up connections: they get so many thresholds."""
LOOK_EVERY_NS: Final = 200_000_000
EVIDENCE_PATIENCE_NS: Final = 12_000_000_000

Identity = tuple[object, ...]


class Candidate(NamedTuple):
    """Ranks that may stand still.

    They must have stood for `patience` thresholds; with `may_work` a busy processor excuses them.
    """

    ranks: frozenset[int]
    patience: int = 1
    may_work: bool = True


class Stall:
    """From "nobody has moved" over "their stacks are wanted" to "declared", and back."""

    def __init__(self, hang_timeout_s: float | None) -> None:
        """Take the threshold of the user, in seconds, or None to derive it from the steps."""
        self._hang_timeout_s = hang_timeout_s
        self._looked_ns = 0
        self._wanted_since_ns = 0
        self._found: set[Identity] = set()
        self._recovered: set[Identity] = set()
        self.ranks: frozenset[int] = frozenset()
        self.wanted: set[int] = set()
        self.is_declared = False

    @property
    def is_explicit(self) -> bool:
        """Whether the user set the threshold."""
        return self._hang_timeout_s is not None

    def threshold_s(self, median_step_s: float) -> float:
        """Return the time without progress, in seconds, that counts as a stall."""
        if self._hang_timeout_s is not None:
            return self._hang_timeout_s
        return max(MIN_THRESHOLD_S, STEPS_OF_PATIENCE * median_step_s)

    def due(self, now_ns: int) -> bool:
        """Whether it is time to look again."""
        if now_ns - self._looked_ns < LOOK_EVERY_NS:
            return False
        self._looked_ns = now_ns
        return True

    def update(
        self,
        candidates: Iterable[Candidate],
        states: Mapping[int, RankState],
        median_step_s: float,
    ) -> None:
        """Look whether one of these sets of ranks stands still."""
        threshold_s = self.threshold_s(median_step_s)
        standing: set[int] = set()
        for candidate in candidates:
            ranks = candidate.ranks
            alive = [rank for rank in ranks if rank in states and not states[rank].left_ns]
            if alive and stalled(
                alive,
                states,
                threshold_s=candidate.patience * threshold_s,
                is_explicit=self.is_explicit,
                may_work=candidate.may_work,
            ):
                standing |= ranks
        if standing and not self.ranks:
            self.ranks = frozenset(standing)
            self.wanted = {r for r in standing if r in states and not states[r].left_ns}
            self._wanted_since_ns = self._looked_ns
        elif self.ranks and not standing:
            self._end(states)

    def _end(self, states: Mapping[int, RankState]) -> None:
        # Ranks that were killed or that gave up did not recover.
        if not any(states[rank].left_ns for rank in self.ranks if rank in states):
            self._recovered |= self._found
        self.ranks, self.wanted, self.is_declared = frozenset(), set(), False
        self._found = set()

    def got_stacks(self, rank: int) -> None:
        """Note that the stacks of a rank came, or that there are none."""
        self.wanted.discard(rank)

    def is_ready(self, now_ns: int) -> bool:
        """Whether the verdict can be given: the evidence is here or has taken too long."""
        if not self.ranks or self.is_declared:
            return False
        if self.wanted and now_ns - self._wanted_since_ns < EVIDENCE_PATIENCE_NS:
            return False
        self.wanted = set()
        return True

    def declare(self, found: set[Identity]) -> None:
        """Note that the checks have judged the stall, and what they found."""
        self.is_declared = True
        self._found = found

    def take_recovered(self) -> set[Identity]:
        """Return the findings of stalls that ended, once."""
        recovered, self._recovered = self._recovered, set()
        return recovered
