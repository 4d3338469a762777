"""COL001: some ranks never called a collective that the others wait in."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    blame_missing,
    group_evidence,
    is_reliable,
    location_in,
    missing_evidence,
    step_of,
)
from distdiag.checks.shared.explanations import (
    condition_passed,
    explain,
    groups_by_place,
    state_of,
    under,
)
from distdiag.checks.shared.holders import holder_of
from distdiag.checks.shared.stuck import activity_of_missing, is_late
from distdiag.events.collectives import Collective
from distdiag.findings.descriptions import (
    agree,
    at,
    blocking_call,
    call_location,
    call_phrase,
    each_whereabouts,
)
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import Alignment, OpenCollective, Trigger

_WHY_CYCLE = (
    "Each of these ranks waits in one process group for a rank that waits in another group."
)
_FIX_CYCLE = "Call the collectives of the process groups in the same order on all ranks."

_WHY_UNRECORDED = (
    "All ranks that left a record wait in one call with matching arguments. A rank without a "
    "record never came to this call, or it died or hung before it could write the record."
)
_FIX_UNRECORDED = (
    "Find out what happened to this rank: read its own log, its exit status and the kernel log of "
    "its node. If its record exists and was only not collected, pass it to `distdiag analyze` "
    "together with the others."
)


class MissingFromCollective(Check[OpenCollective]):
    """Some ranks never called a collective that the others wait in.

    ## What you see
    The ranks that made the call wait until the timeout of the process group, often half an hour,
    and are then killed together. A collective ends only when every rank of its group has called it.

    ## Example
        # wrong: each rank waits in a group where the other has not arrived yet
        groups = (tp, dp) if rank == 0 else (dp, tp)
        for group in groups:
            dist.all_reduce(loss, group=group)

        # right: one order on all ranks
        for group in (tp, dp):
            dist.all_reduce(loss, group=group)

    ## How to fix
    Let every rank of the group make this call, or none. Look at where the missing rank is: it took
    a different branch, left early, waits in a different process group, or is stuck in its own code.

    Changes: The missing rank takes part in the call and spends its time there.

    Leaves: What kept the rank away, if that is slow storage, a lock or a lost message.

    ## When it is not a defect
    The missing rank did make this call: its records show it under the same number.

    To silence it, set `ignore = ["COL001"]` in `distdiag.toml`.

    ## References
    - https://github.com/meta-pytorch/torchrec/issues/4149
    - https://github.com/facebookresearch/optimizers/issues/149
    - https://github.com/pmodels/mpich/issues/1997
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """

    code = "COL001"
    name = "missing-from-collective"
    severity = Severity.ERROR

    def check(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Name the ranks that the others wait for, and where they are instead."""
        if alignment.kind != "collective" or explain(alignment) is not None:
            return
        if _is_message_deadlock(alignment):
            return  # COL012 reports that
        if _is_consequence(alignment):
            return  # it is reported whom the missing ranks wait for
        if is_late(alignment) or activity_of_missing(alignment) is not None:
            return
        if not alignment.missing_ranks & alignment.states.keys():
            yield from self._without_record(alignment)
            return
        verdict = blame_missing(alignment)
        call = alignment.by_rank[min(alignment.present_ranks)]
        is_cycle = alignment.trigger is Trigger.CYCLE
        is_cut_off = alignment.trigger is Trigger.ENDED
        is_note = is_cut_off or not is_reliable(alignment)
        missing, present = alignment.missing_ranks, alignment.present_ranks
        absent = [state_of(alignment, rank) for rank in missing]
        holder = holder_of(absent[0], alignment.states)
        found = self.finding(
            f"{missing.phrase()} never called {call_phrase(call)}, which {present.phrase()} called"
            f"{at(call_location(call))}: {each_whereabouts(absent)}"
            + (f"; {holder.text}" if holder is not None else ""),
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits) or call_location(call),
            grade=Grade.NOTE if is_note else verdict.grade,
            confidence=0.4 if is_note else verdict.confidence,
            evidence=group_evidence(
                alignment, groups_by_place(alignment), lambda each: f"waits in {call_phrase(each)}"
            )
            + missing_evidence(alignment)
            + (holder.evidence if holder is not None else ()),
            why=_WHY_CYCLE if is_cycle else self.why,
            fix=_FIX_CYCLE if is_cycle else holder.fix if holder is not None else self.fix,
        )
        condition = condition_passed(alignment, alignment, present, missing)
        is_known = is_cycle or is_note or holder is not None
        yield found if condition is None or is_known else under(found, condition)

    def _without_record(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Suspect the ranks of which nothing is left while all others wait, if they are fewer."""
        missing, present = alignment.missing_ranks, alignment.present_ranks
        if len(missing) >= len(present):
            return  # most of the job was not read: that says nothing of these ranks
        call = alignment.any_event
        yield self.finding(
            f"{missing.phrase()} left no record, while {present.phrase()} "
            f"{agree('waits', present)} in {call_phrase(call)}{at(call_location(call))}",
            ranks=missing,
            step=call.step,
            location=call_location(call),
            grade=Grade.LIKELY,
            confidence=0.6,
            evidence=group_evidence(
                alignment, groups_by_place(alignment), lambda each: f"waits in {call_phrase(each)}"
            ),
            why=_WHY_UNRECORDED,
            fix=_FIX_UNRECORDED,
        )


def _is_consequence(alignment: Alignment[Collective]) -> bool:
    """Say whether all missing ranks wait elsewhere for a rank that has not come there, either."""
    if alignment.trigger is not Trigger.STALLED:
        return False
    states = alignment.states
    calls = [blocking_call(state_of(alignment, rank)) for rank in alignment.missing_ranks]
    return all(
        call is not None
        and call.group != alignment.any_event.group
        and call.collective_seq_id >= 0
        and any(not states[r].has_reached(call) for r in call.group.ranks if r in states)
        for call in calls
    )


def _is_message_deadlock(alignment: Alignment[Collective]) -> bool:
    if alignment.trigger is not Trigger.CYCLE:
        return False
    calls = [blocking_call(state_of(alignment, rank)) for rank in alignment.missing_ranks]
    return any(call is not None and call.signature.peer is not None for call in calls)
