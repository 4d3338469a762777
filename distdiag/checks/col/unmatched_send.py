"""COL012: a send or a receive has no counterpart."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    Reason,
    Verdict,
    all_work,
    blame_cycle,
    blame_missing,
    is_reliable,
    location_in,
    missing_evidence,
    step_of,
)
from distdiag.checks.shared.explanations import condition_passed, state_of, under
from distdiag.checks.shared.stuck import activity_of_missing
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    at,
    blocking_call,
    call_location,
    call_phrase,
    whereabouts,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import Alignment, OpenCollective, Trigger
from distdiag.views.rank_states import RankState, RankStatus

_FIX_SKIPPED: Final = (
    "Let both ranks make the collective call, or neither of them. Look at what kept the rank that "
    "waits for the message from it."
)


class UnmatchedSend(Check[OpenCollective]):
    """A send or a receive has no counterpart.

    ## What you see
    The rank waits until the timeout: a receive without a send, or a large send without a receive,
    never ends. A message needs both sides, with the same tag, in the same order for each pair of
    ranks.

    ## Example
        # wrong: both neighbours receive first, and wait for each other
        dist.recv(theirs, src=peer)
        dist.send(mine, dst=peer)

        # right: both messages at once
        ops = [dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, mine, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    ## How to fix
    Add the missing side, or remove this one. For an exchange in both directions call
    `dist.batch_isend_irecv(ops)`. Or let one of the two ranks send first and the other rank receive
    first.

    Changes: The order in which the two ranks communicate.

    Leaves: Messages that were already paired with the wrong call.

    ## When it is not a defect
    The peer has a record of the matching call: same group, peer and tag.

    To silence it, set `ignore = ["COL012"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/172668
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.batch_isend_irecv
    """

    code = "COL012"
    name = "unmatched-send"
    severity = Severity.ERROR

    def check(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Name the side that did not come."""
        if alignment.kind != "message":
            return
        call = alignment.any_event
        peer = min(alignment.missing_ranks)
        state = state_of(alignment, peer)
        if state.status in (RankStatus.RAISED, RankStatus.DIED):
            return  # the failure is the reason, and has a check of its own
        if activity_of_missing(alignment) is not None:
            return
        verdict = self._verdict(alignment, call)
        is_waiting = blocking_call(state_of(alignment, call.rank)) == call
        # An asynchronous message that is never picked up harms nobody.
        is_lost = not call.is_async and state.status is RankStatus.FINISHED
        is_note = (
            not (is_waiting or is_lost)
            or (alignment.trigger is Trigger.ENDED and not is_lost)
            or not is_reliable(alignment)
            or (alignment.trigger is Trigger.STALLED and all_work(alignment, RankSet([peer])))
        )
        skipped = _skipped(alignment, call, state)
        found = self.finding(
            f"rank {call.rank}'s {call_phrase(call)}{at(call_location(call))} has no counterpart: "
            f"rank {peer} {whereabouts(state)}"
            + (f", which rank {call.rank} never called" if skipped is not None else "")
            + _other_tag(call, state),
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits) or call_location(call),
            severity=Severity.ERROR if is_waiting else Severity.WARNING,
            grade=Grade.NOTE if is_note else verdict.grade,
            confidence=0.3 if is_note else verdict.confidence,
            evidence=(
                Evidence(
                    ranks=RankSet([call.rank]),
                    summary=f"waits in {call_phrase(call)}" if is_waiting else call_phrase(call),
                    location=call_location(call),
                ),
                *missing_evidence(alignment),
            ),
            fix=_FIX_SKIPPED if skipped is not None else self.fix,
        )
        condition = None
        if skipped is not None and not is_note:
            sides = RankSet([peer]), RankSet([call.rank])
            condition = condition_passed(skipped, alignment, *sides)
        yield found if condition is None else under(found, condition)

    def _verdict(self, alignment: Alignment[Collective], call: Collective) -> Verdict:
        if alignment.trigger is Trigger.CYCLE:
            return blame_cycle(alignment)
        if "recv" not in call.signature.op:
            # A send too many looks like a receive too few.
            return Verdict(alignment.expected_ranks, RankSet(), Reason.UNDECIDED)
        return blame_missing(alignment)


def _skipped(
    alignment: OpenCollective, call: Collective, peer: RankState
) -> Alignment[Collective] | None:
    """Return the collective in which the peer waits, if the rank of this call never came there."""
    waited = blocking_call(peer) if alignment.trigger is Trigger.CYCLE else None
    if waited is None or waited.collective_seq_id < 0 or call.rank not in waited.group.ranks:
        return None
    if state_of(alignment, call.rank).has_reached(waited):
        return None
    return Alignment(
        "collective",
        (waited.group.label, waited.collective_seq_id),
        {peer.rank: waited},
        RankSet(waited.group.ranks),
        alignment.states,
        alignment.trigger,
    )


def _other_tag(call: Collective, state: RankState) -> str:
    for other in state.waiting:
        if other.signature.peer == call.rank and other.signature.tag != call.signature.tag:
            return f" (the tags differ: {call.signature.tag} here, {other.signature.tag} there)"
    return ""
