"""HNG001: a rank raised an exception, and the others wait for it or fail in consequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.alignment import Alignment, Fate, RankState
from distdiag.checks.base import Check
from distdiag.event import Collective, Raised
from distdiag.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import (
    at,
    blocking_call,
    raised_phrase,
    user_location,
    whereabouts,
)
from distdiag.reasoning.failures import first_died, first_raised, is_interruption


class RankRaised(Check):
    """A rank raised an exception, and the others wait for it or fail in consequence.

    ## What it detects
    The first exception that nobody caught and that is no consequence of another: not a connection
    that a peer closed, not a timeout, not a collective that contradicted a peer's. If all ranks
    raised the same at the same line, the fault is not one of distribution and is a note.

    ## Why it matters
    The other ranks wait, are killed by the launcher, or raise errors about lost connections that
    hide the first one. The log shows the loudest error, not the cause.

    ## Example
    One rank gets an empty batch and fails an assertion; the others stand in the next `all_reduce`.

    ## How to fix
    Fix the exception of the named rank. The errors of the others go away with it.

    ## References
    - `torch.distributed.elastic.multiprocessing.errors.record`
    """

    code = "HNG001"
    name = "rank-raised"
    severity = Severity.ERROR
    needs = (Raised, Collective)

    why = (
        "This exception came first. The others could not go on without the rank: they wait for it, "
        "lost their connection to it, or were stopped by the launcher."
    )
    fix = (
        "Fix what this exception says on this rank; its data or its shard differs from the others'."
    )
    fix_changes = "The other ranks' errors about connections and timeouts disappear as well."
    fix_leaves = "Exceptions that other ranks would have met later by themselves."
    disproof = "Another rank has an earlier exception that is not about a connection or a timeout."

    def check_missing(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        """Name the exception at once when others wait for the rank that raised it."""
        fates = {alignment.states[r].fate for r in alignment.missing_ranks if r in alignment.states}
        if Fate.RAISED in fates:
            yield from self._judge(alignment.states)

    def check_ranks(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Name the exception as soon as it is known what the other ranks do."""
        yield from self._judge(states)

    def _judge(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        first = first_raised(states)
        others = RankSet(states.keys() - first)
        if not first or any(_may_raise_too(states[rank]) for rank in others):
            return
        state = states[min(first)]
        if any(states[rank].left_ns < state.left_ns for rank in first_died(states)):
            return  # a peer had died before: whatever this rank then met, that came first
        is_note = not others or is_interruption(state)
        location = _line(state)
        yield self.finding(
            f"{first.phrase()} raised {raised_phrase(state)}{at(location)}"
            + (f", before {others.phrase()} failed or waited in vain" if others else ""),
            ranks=first,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.PROVEN,
            confidence=0.95,
            evidence=(
                Evidence(
                    ranks=first,
                    summary=f"raised {raised_phrase(state)}",
                    location=location,
                    values={"traceback": state.raised.traceback[-4000:] if state.raised else ""},
                ),
                *(_evidence(states[rank]) for rank in others),
            ),
        )


def _may_raise_too(state: RankState) -> bool:
    """Say whether a rank still runs freely, so that it may be about to raise the same."""
    return state.fate is Fate.RUNNING and blocking_call(state) is None and state.idle_s < 1.0


def _evidence(state: RankState) -> Evidence:
    call = blocking_call(state) or state.last_call
    location = user_location(call.site.frames) if call is not None else None
    if state.raised is not None:
        location = _line(state)
    return Evidence(ranks=RankSet([state.rank]), summary=whereabouts(state), location=location)


def _line(state: RankState) -> Location | None:
    return user_location(state.raised.frames) if state.raised is not None else None
