"""Which ranks keep the job from going on, when no contradiction of calls says why."""

from collections.abc import Mapping
from typing import Any

from distdiag.checks.shared.activities import Activity, common_activity, will_come
from distdiag.checks.shared.culprits import all_work, blame_missing
from distdiag.checks.shared.explanations import explain, state_of
from distdiag.checks.shared.failures import has_contradiction
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import blocking_call
from distdiag.views.alignment import Alignment, Trigger
from distdiag.views.rank_states import RankState, RankStatus

STILL_S = 1.0
"""A rank that moved less than so many seconds ago does not stand still."""


def activity_of_missing(alignment: Alignment[Any]) -> Activity | None:
    """Return what all the ranks do that the others wait for here, if it is one known thing.

    None also where the records explain the wait better: a guard, a loop, a rank that has gone.
    """
    if alignment.trigger is not Trigger.STALLED or explain(alignment) is not None:
        return None
    culprits = blame_missing(alignment).culprits
    return common_activity(state_of(alignment, rank) for rank in culprits)


def is_late(alignment: Alignment[Any]) -> bool:
    """Say whether the ranks that are waited for use the processor: they are slow, not stuck."""
    if alignment.trigger is not Trigger.STALLED:
        return False
    culprits = blame_missing(alignment).culprits
    return bool(culprits) and all_work(alignment, culprits)


def odd_ranks(states: Mapping[int, RankState]) -> RankSet:
    """Return whom to look at when the whole job stands still and its calls do not say why.

    Those that were never heard of, else those that wait in no call (the ones that do not run on a
    processor, if there are such), else all. Empty if the job moves, or a rank has failed, or the
    others wait for one in a collective.
    """
    running = [state for state in states.values() if state.status is RankStatus.RUNNING]
    has_failed = any(
        state.status in (RankStatus.RAISED, RankStatus.DIED) for state in states.values()
    )
    if not running or has_failed or any(state.idle_s < STILL_S for state in running):
        return RankSet()
    if has_contradiction(states) or any(_waits_for_one(s, states) for s in running):
        return RankSet()
    waiting = RankSet(
        s.rank for s in running if blocking_call(s) is not None or s.is_in_unrecorded_call
    )
    silent = RankSet(s.rank for s in states.values() if s.status is RankStatus.SILENT)
    free = RankSet(s.rank for s in running if s.rank not in waiting)
    asleep = RankSet(rank for rank in free if not will_come(states[rank], states))
    return silent or asleep or free or waiting


def _waits_for_one(state: RankState, states: Mapping[int, RankState]) -> bool:
    """Say whether a rank waits for one that has not come, which other checks tell.

    Also in a call that does not block the host, such as one of DDP's reducer: the host then waits
    for it somewhere else.
    """
    return any(
        call.collective_seq_id < 0
        or any(not states[peer].has_reached(call) for peer in call.group.ranks if peer in states)
        for call in state.waiting
    )
