"""What was seen of ranks from outside, as evidence: the kernel, the GPU, logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distdiag.alignment import RankState
from distdiag.event import Observed
from distdiag.finding import Evidence
from distdiag.ranks import RankSet

MOST_RANKS = 8
"""Of so many ranks what was seen is shown; they are usually stuck in the same way."""


def outside_evidence(states: Mapping[int, RankState], ranks: Iterable[int]) -> tuple[Evidence, ...]:
    """Return what each source saw of these ranks, and which source could not see them and why."""
    seen = [event for rank in sorted(ranks) for event in states[rank].observed.values()]
    told = [event for event in seen if not event.error]
    shown = {event.rank for event in told}
    few = sorted(shown)[:MOST_RANKS]
    return tuple(_evidence(event) for event in told if event.rank in few) + _blind(seen)


def _evidence(event: Observed) -> Evidence:
    return Evidence(
        ranks=RankSet([event.rank]),
        summary=f"{event.source}: {event.summary}",
        values=event.values,
    )


def _blind(seen: Iterable[Observed]) -> tuple[Evidence, ...]:
    ranks_by_reason: dict[tuple[str, str], list[int]] = {}
    for event in seen:
        if event.error:
            ranks_by_reason.setdefault((event.source, event.error), []).append(event.rank)
    return tuple(
        Evidence(ranks=RankSet(ranks), summary=f"{source} saw nothing: {reason}")
        for (source, reason), ranks in ranks_by_reason.items()
    )
