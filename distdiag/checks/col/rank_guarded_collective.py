"""COL009: a collective stands under a condition that holds on some ranks only."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import is_reliable, missing_evidence, parting_evidence
from distdiag.checks.shared.explanations import GuardedCall, camps_by_place, explain
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import Alignment, CollectiveView, OpenCollective


class RankGuardedCollective(Check[CollectiveView | OpenCollective]):
    """A collective stands under a condition that holds on some ranks only.

    ## What it detects
    A collective that some ranks of the group never reached, or that met another call of theirs,
    and that was made under a test on the rank (`if rank == 0:`, an earlier `if rank: return`, a
    decorator) that does not stand before what the others do. The user's whole stack is looked
    at: the test is often far above the call.

    ## Why it matters
    A collective is complete when every rank of its group has called it. The guarded ranks wait for
    ever, or their call is paired with the next one of the others.

    ## Example
    `if is_main_process: engine.save_checkpoint(path)`, where saving a sharded model is a collective
    of all ranks.

    ## How to fix
    Call it on all ranks and guard only the part that is for one: the writing, the printing.

    ## References
    - `torch.distributed.checkpoint`: saving is called on every rank
    - `torch.distributed.get_rank`
    """

    code = "COL009"
    name = "rank-guarded-collective"
    severity = Severity.ERROR

    why = (
        "The call needs every rank of its group, and the condition before it keeps some of them "
        "away. Savers, metrics, generation and any forward of a sharded model are collectives, too."
    )
    fix = (
        "Move the call out of the condition, so that every rank of the group makes it, and leave "
        "only the local part (writing, logging) under the condition."
    )
    fix_changes = "All ranks now spend the time and memory of the call."
    fix_leaves = "A second guarded call further on, which would hang next."
    disproof = "A rank that the condition excludes has a record of this very call."

    def check(self, view: CollectiveView | OpenCollective) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case CollectiveView():
                yield from self._check_alignment(view)
            case OpenCollective():
                yield from self._check_missing(view)

    def _check_alignment(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Judge a call that met another one."""
        yield from self._judge(alignment)

    def _check_missing(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Judge a call that some ranks never made."""
        yield from self._judge(alignment)

    def _judge(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        found = explain(alignment)
        if not isinstance(found, GuardedCall):
            return
        others = RankSet(alignment.expected_ranks - found.ranks)
        # Where most ranks are guarded, the few that the condition sends away are the odd ones.
        odd = others if len(found.ranks) > len(others) else found.ranks
        location = call_location(found.call)
        guard = found.guard
        yield self.finding(
            f"{call_phrase(found.call)}{at(location)} is reached by {found.ranks.phrase()} only, "
            f"under `{guard.text}` in line {guard.location.line}; {others.phrase()} "
            f"{self._instead(found)}",
            ranks=odd,
            step=found.call.step,
            location=location,
            subjects=(found.call.site.module,) if found.call.site.module else (),
            grade=Grade.PROVEN if is_reliable(alignment) else Grade.NOTE,
            confidence=0.95,
            evidence=(
                Evidence(
                    ranks=found.ranks,
                    summary=f"is under the condition `{guard.text}`",
                    location=guard.location,
                ),
                *self._calls(found),
                *missing_evidence(alignment),
                *parting_evidence(alignment),
            ),
        )

    def _instead(self, found: GuardedCall) -> str:
        elsewhere = [call for r, call in found.point.by_rank.items() if r not in found.ranks]
        if not elsewhere:
            return "never came there"
        call = elsewhere[0]
        return f"called {call.signature.op} instead{at(call_location(call))}"

    def _calls(self, found: GuardedCall) -> Iterator[Evidence]:
        for camp in camps_by_place(found.point):
            call = found.point.by_rank[min(camp)]
            yield Evidence(ranks=camp, summary=call_phrase(call), location=call_location(call))
