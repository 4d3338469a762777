"""When a job counts as standing still, and the steps from there to a verdict."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from distdiag.engine.hangs.waits import stalled, works
from distdiag.views.rank_states import RankState, RankStatus

MIN_THRESHOLD_S: Final = 30.0
STEPS_OF_PATIENCE: Final = 10
SAME_CALL_PATIENCE: Final = 4
"""Ranks that are all in their calls may set up connections: they get so many thresholds."""
IDLE_JOB_PATIENCE: Final = 10
"""Ranks that all do nothing may wait for a stranger on purpose: they get as many as a compiler."""
DEADLOCK_S: Final = 1.5
"""Ranks that wait in calls which cannot end move never again; a record may come a second late."""
LOOK_EVERY_NS: Final = 200_000_000
EVIDENCE_S: Final = 10.0
DEADLOCK_EVIDENCE_S: Final = 1.5
"""Where the records say why, stacks only add to it, and somebody waits for the end."""
LATE_EVIDENCE_NS: Final = 2_000_000_000
"""Evidence may come so much later than it was asked for, on its way from other nodes."""
LOOK_AGAIN: Final = 2
"""What one look at a rank excused is looked at again after a threshold, then after so many times
the time of before: ranks that wait on purpose are disturbed ever more rarely."""

Identity = tuple[object, ...]


class Candidate(NamedTuple):
    """Ranks that may stand still.

    They must have stood for `patience` thresholds; with `may_work` a busy processor excuses them.
    `is_deadlock`: they wait in calls of which the records show that they cannot end.
    """

    ranks: frozenset[int]
    patience: int = 1
    may_work: bool = True
    is_deadlock: bool = False


class Stall:
    """From "nobody has moved" over "their stacks are wanted" to "declared", and back."""

    def __init__(self, hang_timeout_s: float | None) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._looked_ns = 0
        self._wanted_since_ns = 0
        self._working: frozenset[int] = frozenset()
        self._look_again_ns = 0
        self._looks = 0
        self._found: set[Identity] = set()
        self._shown: set[Identity] = set()
        self._recovered: set[Identity] = set()
        self.ranks: frozenset[int] = frozenset()
        self.wanted: set[int] = set()
        self.evidence_s = EVIDENCE_S
        self.is_declared = False
        self.is_hang = False

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
    ) -> set[Identity]:
        """Look whether one of these sets of ranks stands still.

        Return the points that were shown in a stall that is over or is looked at anew.
        """
        threshold_s = self.threshold_s(median_step_s)
        standing = self._standing(candidates, states, threshold_s)
        ranks = frozenset(rank for candidate in standing for rank in candidate.ranks)
        if self.ranks and not ranks:
            return self._end(states)
        if not ranks or not self._is_new(ranks, states):
            return set()
        shown, self._shown = self._shown, set()
        is_deadlock = all(candidate.is_deadlock for candidate in standing)
        self.evidence_s = DEADLOCK_EVIDENCE_S if is_deadlock else EVIDENCE_S
        self._look_again_ns = self._looked_ns + int(threshold_s * 1e9 * LOOK_AGAIN**self._looks)
        self.ranks, self.is_declared = ranks, False
        self._looks += 1
        self.wanted = {rank for rank in ranks if rank in states and not states[rank].left_ns}
        self._wanted_since_ns = self._looked_ns
        return shown

    def _standing(
        self,
        candidates: Iterable[Candidate],
        states: Mapping[int, RankState],
        threshold_s: float,
    ) -> list[Candidate]:
        standing = []
        for candidate in candidates:
            ranks = candidate.ranks
            alive = [rank for rank in ranks if rank in states and not states[rank].left_ns]
            needed_s = candidate.patience * threshold_s
            if candidate.is_deadlock:
                needed_s = min(DEADLOCK_S, threshold_s)
            if alive and stalled(
                alive,
                states,
                threshold_s=needed_s,
                is_explicit=self.is_explicit,
                may_work=candidate.may_work,
            ):
                standing.append(candidate)
        return standing

    def _is_new(self, ranks: frozenset[int], states: Mapping[int, RankState]) -> bool:
        """Whether there is more to judge than before: more ranks, or one no longer works.

        Where none worked, its state at one look may have excused a rank that polls: look again.
        """
        if not self.ranks:
            return True
        if not self.is_declared or self.is_hang:
            return False
        if ranks - self.ranks or any(not works(states[r]) for r in self._working & ranks):
            return True
        return not self._working and self._looked_ns >= self._look_again_ns

    def _end(self, states: Mapping[int, RankState]) -> set[Identity]:
        # Ranks that were killed, that gave up or whose wait failed did not recover.
        if not any(_failed(states[rank]) for rank in self.ranks if rank in states):
            self._recovered |= self._found
        shown, self._shown = self._shown, set()
        self.ranks, self.wanted, self._working = frozenset(), set(), frozenset()
        self._looks = 0
        self.is_declared = self.is_hang = False
        self._found = set()
        return shown

    def got_stacks(self, rank: int) -> None:
        """Note that the stacks of a rank came, or that there are none."""
        self.wanted.discard(rank)

    def is_ready(self, now_ns: int) -> bool:
        """Whether the verdict can be given: the evidence is here or has taken too long."""
        if not self.ranks or self.is_declared:
            return False
        patience_ns = int(self.evidence_s * 1e9) + LATE_EVIDENCE_NS
        if self.wanted and now_ns - self._wanted_since_ns < patience_ns:
            return False
        self.wanted = set()
        return True

    def declare(
        self,
        found: set[Identity],
        shown: set[Identity],
        states: Mapping[int, RankState],
        *,
        is_hang: bool,
    ) -> None:
        """Note that the checks have judged the stall: what they found, at which points.

        Without a hang it is judged anew when a rank that works now does not any more, or after a
        while if none works.
        """
        self.is_declared, self.is_hang = True, is_hang
        self._found |= found
        self._shown |= shown
        self._working = frozenset(r for r in self.ranks if r in states and works(states[r]))

    def take_recovered(self) -> set[Identity]:
        """Return the findings of stalls that ended, once."""
        recovered, self._recovered = self._recovered, set()
        return recovered


def _failed(state: RankState) -> bool:
    is_bad = state.status in (RankStatus.RAISED, RankStatus.DIED) or bool(state.exit_status)
    return is_bad or state.last_call_state == "failed"
