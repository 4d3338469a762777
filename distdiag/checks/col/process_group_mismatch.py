"""COL008: ranks create process groups differently, or in different order."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.col.mismatch import each_group
from distdiag.checks.shared.activities import Activity
from distdiag.checks.shared.culprits import (
    all_work,
    blame,
    blame_missing,
    grade_of,
    group_by,
    missing_evidence,
)
from distdiag.checks.shared.explanations import state_of
from distdiag.checks.shared.stuck import activity_of_missing
from distdiag.events.collectives import GroupCreated
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, frames_of, user_location, whereabouts
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.findings.source import rank_guards
from distdiag.views.alignment import Alignment, GroupView, OpenGroup, Trigger
from distdiag.views.rank_states import RankStatus

_MAIN: Final = "MainThread"
_FIX_OF_THREADS: Final = (
    "Create all process groups in one thread, in the same order on every rank, before other "
    "threads start: threads make their calls in a different order on each rank."
)


class ProcessGroupMismatch(Check[GroupView | OpenGroup]):
    """Ranks create process groups differently, or in different order.

    ## What you see
    Ranks wait in the creation of a group, or later collectives meet in the wrong group. All ranks
    must call `new_group`, members of the group or not, and torch identifies groups by the order of
    their creation.

    ## Example
        # wrong: only the members make the call
        if rank in (0, 1):
            group = dist.new_group([0, 1])

        # right: all ranks create all groups, in one order
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        group = groups[rank // 2]

    ## How to fix
    Call `dist.new_group(ranks)` for every group on every rank, in the same order. If only the
    members can call it, pass `use_local_synchronization=True`.

    Changes: Ranks also make the calls for groups that they are not in.

    Leaves: Results of collectives that already ran in the wrong group.

    ## When it is not a defect
    All ranks' records show this call with the same members at the same place in the order.

    A different description of the same members is a note.

    A different description of the same members is a note. To silence it, set `ignore = ["COL008"]`
    in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/25390
    - https://github.com/pytorch/pytorch/issues/49846
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.init_device_mesh
    """

    code = "COL008"
    name = "process-group-mismatch"
    severity = Severity.ERROR

    def check(self, view: GroupView | OpenGroup) -> Iterator[Finding]:
        """Judge what the view shows."""
        if isinstance(view, GroupView):
            yield from self._differing_members(view)
        else:
            yield from self._missing_call(view)

    def _differing_members(self, alignment: GroupView) -> Iterator[Finding]:
        groups = group_by(alignment, lambda call: tuple(sorted(call.ranks)))
        differs = len(groups) > 1
        if not differs:
            groups = group_by(alignment, lambda call: (call.ranks, call.desc))
        if len(groups) < 2 or _is_split(alignment):
            return
        verdict = blame(alignment, groups)
        what = each_group(alignment, groups, _call_phrase)
        in_threads = any(call.thread != _MAIN for call in alignment.by_rank.values())
        yield self.finding(
            f"process group creation #{alignment.key[-1]} differs: {what}",
            ranks=verdict.culprits,
            step=alignment.by_rank[min(verdict.culprits)].step,
            location=_where(alignment.by_rank[min(verdict.culprits)]),
            grade=grade_of(alignment, verdict) if differs else Grade.NOTE,
            confidence=verdict.confidence if differs else 0.2,
            evidence=_evidence(alignment, groups),
            fix=_FIX_OF_THREADS if in_threads else self.fix,
        )

    def _missing_call(self, alignment: OpenGroup) -> Iterator[Finding]:
        missing = alignment.missing_ranks
        statuses = {state_of(alignment, rank).status for rank in missing}
        if statuses & {RankStatus.RAISED, RankStatus.DIED}:
            return
        if activity_of_missing(alignment) not in (None, Activity.INITIALISATION):
            return
        call = alignment.any_event
        verdict = blame_missing(alignment)
        guards = [g for f in reversed(call.site.user_frames) for g in rank_guards(f)]
        is_late = alignment.trigger is Trigger.STALLED and all_work(alignment, verdict.culprits)
        is_note = is_late or alignment.trigger is Trigger.ENDED
        under = f", under `{guards[0].text}`" if guards else ""
        place = user_location(frames_of(state_of(alignment, min(verdict.culprits))))
        odd = alignment.present_ranks if guards and len(missing) >= 2 else verdict.culprits
        yield self.finding(
            f"{alignment.present_ranks.phrase()} called {_call_phrase(call)}"
            f"{at(_where(call))}{under}, and {missing.phrase()} did not: {missing.phrase()} "
            f"{whereabouts(state_of(alignment, min(missing)))}",
            ranks=odd,
            step=call.step,
            location=_where(call) if guards else place or _where(call),
            grade=Grade.NOTE if is_note else grade_of(alignment, verdict),
            confidence=0.3 if is_note else verdict.confidence,
            evidence=_evidence(alignment, (alignment.present_ranks,))
            + tuple(
                Evidence(
                    ranks=alignment.present_ranks, summary=f"under {g.text}", location=g.location
                )
                for g in guards
            )
            + missing_evidence(alignment),
        )


def _evidence(
    alignment: Alignment[GroupCreated], groups: tuple[RankSet, ...]
) -> tuple[Evidence, ...]:
    calls = [(group, alignment.by_rank[min(group)]) for group in groups]
    return tuple(
        Evidence(
            ranks=ranks,
            summary=f"{call.api} of {list(call.ranks)} named {call.desc or 'nothing'}"
            + _thread_phrase(call),
            location=_where(call),
        )
        for ranks, call in calls
    )


def _call_phrase(call: GroupCreated) -> str:
    return f"{call.api}({list(call.ranks)}){_thread_phrase(call)}"


def _thread_phrase(call: GroupCreated) -> str:
    return f" in thread {call.thread}" if call.thread != _MAIN else ""


def _where(call: GroupCreated) -> Location | None:
    return user_location(call.site.frames)


def _is_split(alignment: Alignment[GroupCreated]) -> bool:
    """Say whether one call splits a group into disjoint ones, each rank naming its own."""
    calls = alignment.by_rank
    return all(
        "split" in call.api and rank in call.ranks and calls.get(peer, call).ranks == call.ranks
        for rank, call in calls.items()
        for peer in call.ranks
    )
