"""Which of the ranks that disagree is to blame, and how sure that is."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from distdiag.checks.shared.activities import will_come
from distdiag.checks.shared.explanations import groups_by_place, skipping_ranks, state_of
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    blocking_call,
    call_location,
    frames_of,
    user_location,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Grade, Location
from distdiag.views.alignment import Alignment, Trigger
from distdiag.views.rank_states import RankStatus


class Reason(StrEnum):
    """What tells the culprits from the others."""

    MAJORITY = "majority"
    LEFT = "left"
    BEHIND = "behind"
    SKIPPED = "skipped"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The culprits, the others, and what distinguishes them. Without a reason all are culprits."""

    culprits: RankSet
    others: RankSet
    reason: Reason

    @property
    def grade(self) -> Grade:
        """Return proven where the records themselves name the culprits, else likely."""
        is_sure = self.reason in (Reason.MAJORITY, Reason.LEFT)
        return Grade.PROVEN if is_sure else Grade.LIKELY

    @property
    def confidence(self) -> float:
        """Return how likely it is that these are the right ranks and the right reason."""
        return {Reason.MAJORITY: 0.95, Reason.LEFT: 0.95, Reason.BEHIND: 0.85}.get(
            self.reason, 0.75
        )


def group_by(alignment: Alignment[Any], key: Callable[[Any], Hashable]) -> tuple[RankSet, ...]:
    """Group the ranks that are here by a property of their events, the larger groups first."""
    ranks_by_key: dict[Hashable, list[int]] = {}
    for rank in alignment.present_ranks:
        ranks_by_key.setdefault(key(alignment.by_rank[rank]), []).append(rank)
    groups = [RankSet(ranks) for ranks in ranks_by_key.values()]
    return tuple(sorted(groups, key=lambda group: (-len(group), min(group))))


def blame(
    alignment: Alignment[Any], groups: Sequence[RankSet], *, may_skip: bool = False
) -> Verdict:
    """Find the odd ranks among groups: the minority, or those that skipped a call, or nobody."""
    everyone = RankSet(rank for group in groups for rank in group)
    largest = max(groups, key=len)
    if 2 * len(largest) > len(everyone) + _num_unobserved(alignment):
        return Verdict(RankSet(everyone - largest), largest, Reason.MAJORITY)
    skipping = skipping_ranks(alignment) if may_skip else RankSet()
    if skipping:
        return Verdict(skipping, RankSet(everyone - skipping), Reason.SKIPPED)
    return Verdict(everyone, RankSet(), Reason.UNDECIDED)


def _num_unobserved(alignment: Alignment[Any]) -> int:
    """Return of how many members nothing was read: they may all have done as the minority did."""
    event = alignment.any_event
    if not isinstance(event, Collective):
        return 0
    return len(set(event.group.ranks) - alignment.expected_ranks - alignment.present_ranks)


def blame_missing(alignment: Alignment[Any]) -> Verdict:
    """Find whom the others wait for: of the missing ranks those that wait for nobody themselves."""
    present, missing = alignment.present_ranks, alignment.missing_ranks
    left = RankSet(r for r in missing if state_of(alignment, r).status is RankStatus.FINISHED)
    if left == missing:
        if len(left) > len(present):
            # All but a few went home: the few made a call too many.
            return Verdict(present, missing, Reason.MAJORITY)
        return Verdict(left, present, Reason.LEFT)
    if left:
        return Verdict(left, RankSet(alignment.expected_ranks - left), Reason.LEFT)
    if alignment.trigger is Trigger.CYCLE:
        return blame_cycle(alignment)
    free = (r for r in missing if blocking_call(state_of(alignment, r)) is None)
    roots = RankSet(free) or missing
    return Verdict(roots, RankSet(alignment.expected_ranks - roots), Reason.BEHIND)


def blame_cycle(alignment: Alignment[Any]) -> Verdict:
    """Find the odd ranks of a circle of waiting ranks: the fewer side, or everyone."""
    present, missing = alignment.present_ranks, alignment.missing_ranks
    if len(missing) < len(present):
        return Verdict(missing, present, Reason.MAJORITY)
    return Verdict(alignment.expected_ranks, RankSet(), Reason.UNDECIDED)


def is_reliable(alignment: Alignment[Any]) -> bool:
    """Say whether the records of all ranks concerned can be relied upon to be complete."""
    return not any(state_of(alignment, rank).incomplete for rank in alignment.expected_ranks)


def grade_of(alignment: Alignment[Any], verdict: Verdict) -> Grade:
    """Return how sure a verdict is, given how complete the records are."""
    return verdict.grade if is_reliable(alignment) else Grade.NOTE


def all_work(alignment: Alignment[Any], ranks: RankSet) -> bool:
    """Say whether the ranks use the processor, or would, and so are late rather than stuck."""
    states = [state_of(alignment, rank) for rank in ranks]
    return all(
        state.status is RankStatus.RUNNING and will_come(state, alignment.states)
        for state in states
    )


def location_in(alignment: Alignment[Any], ranks: RankSet) -> Location | None:
    """Return the innermost line of user code of the lowest of these ranks, here or where it is."""
    rank = min(ranks)
    event = alignment.by_rank.get(rank)
    if event is not None:
        return call_location(event)
    return user_location(frames_of(state_of(alignment, rank)))


def step_of(alignment: Alignment[Any], ranks: RankSet) -> int:
    """Return the step in which the lowest of these ranks is."""
    event = alignment.by_rank.get(min(ranks))
    return event.step if event is not None else state_of(alignment, min(ranks)).step


def group_evidence(
    alignment: Alignment[Collective],
    groups: Sequence[RankSet],
    summary: Callable[[Collective], str],
) -> tuple[Evidence, ...]:
    """Return one piece of evidence for each group, at the line where its lowest rank called."""
    calls = [(group, alignment.by_rank[min(group)]) for group in groups]
    return tuple(
        Evidence(ranks=ranks, summary=summary(call), location=call_location(call))
        for ranks, call in calls
    ) + parting_evidence(alignment)


def missing_evidence(alignment: Alignment[Any]) -> tuple[Evidence, ...]:
    """Return where each missing rank is instead, equal places together."""
    ranks_at: dict[tuple[str, Location | None], list[int]] = {}
    for rank in alignment.missing_ranks:
        state = state_of(alignment, rank)
        what = (whereabouts(state), user_location(frames_of(state)))
        ranks_at.setdefault(what, []).append(rank)
    return tuple(
        Evidence(ranks=RankSet(ranks), summary=text, location=location)
        for (text, location), ranks in ranks_at.items()
    )


def parting_evidence(alignment: Alignment[Any]) -> tuple[Evidence, ...]:
    """Return where the ranks' calls began to come from different places, if earlier than here."""
    origin = alignment.parted
    if origin is None or alignment.kind != "collective":
        return ()
    return tuple(
        Evidence(
            ranks=group,
            summary=f"from #{origin.key[-1]} on the ranks called from different places: "
            f"here {origin.by_rank[min(group)].signature.op}",
            location=call_location(origin.by_rank[min(group)]),
        )
        for group in groups_by_place(origin)
    )
