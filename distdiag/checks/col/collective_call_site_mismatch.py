"""COL007: ranks issue the same collective for different parts of the program."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    blame,
    camp_evidence,
    grade_of,
    group_by,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import camps_by_place, explain, lagging_ranks, unexplained
from distdiag.events.collectives import Collective
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import Alignment, CollectiveView
from distdiag.views.invariants import Aspect, clean_module, contradiction


class CollectiveCallSiteMismatch(Check[CollectiveView]):
    """Ranks issue the same collective for different parts of the program.

    ## What it detects
    A collective that agrees in operation, size and dtype, but gathers or reduces the parameters of
    different modules on different ranks; or that comes from different lines because a rank made an
    additional call before and lags behind by one since. A mere difference of lines is a note: both
    branches of an `if` may well broadcast.

    ## Why it matters
    Nothing hangs and nothing fails. Shards of different parameters, or different metrics, are
    mixed, and the numbers are wrong.

    ## Example
    Two sharded adapters of equal size run in the order in which each rank's batch names them: one
    rank gathers `adapters.image` while the other gathers `adapters.text`.

    ## How to fix
    Run the modules, and make the calls, in one order on all ranks: sort the keys, or loop over a
    fixed list.

    ## References
    - `torch.distributed.fsdp.fully_shard`: forward order must be the same on all ranks
    """

    code = "COL007"
    name = "collective-call-site-mismatch"
    severity = Severity.ERROR

    why = (
        "Calls are paired by order, not by what they are for. These two fit in kind and size, so "
        "they went through and mixed values that do not belong together."
    )
    fix = (
        "Fix the order: iterate over a sorted or agreed list instead of what the local data holds, "
        "and make calls that only one rank makes on all ranks or on none."
    )
    fix_changes = "The results: what was computed so far used mixed values."
    fix_leaves = "Weights and optimizer state that wrong values have reached; start again before."
    disproof = "The records show the same module, and the same line, on all ranks of this call."

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Compare what the calls are for, then look for a rank that lags behind by a call."""
        if alignment.kind != "collective":
            return
        if unexplained(alignment) is Aspect.MODULE:
            yield self._modules(alignment)
        elif contradiction(alignment) is None:
            yield from self._places(alignment)

    def _modules(self, alignment: Alignment[Collective]) -> Finding:
        camps = group_by(alignment, lambda call: clean_module(call.site.module))
        names = [clean_module(alignment.by_rank[min(camp)].site.module) or "?" for camp in camps]
        what = ", ".join(f"{n} on {c.phrase()}" for n, c in zip(names, camps, strict=True))
        verdict = blame(alignment, camps)
        return self.finding(
            f"{call_phrase(alignment.any_event)} mixes the parameters of different modules: {what}",
            ranks=verdict.culprits,
            step=step_of(alignment, verdict.culprits),
            location=location_in(alignment, verdict.culprits),
            subjects=tuple(sorted(names)),
            grade=grade_of(alignment, verdict),
            confidence=verdict.confidence,
            evidence=camp_evidence(
                alignment, camps, lambda call: f"is for module {clean_module(call.site.module)}"
            ),
        )

    def _places(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        camps = camps_by_place(alignment)
        if len(camps) < 2:
            return
        if explain(alignment) is not None:
            return
        lagging = lagging_ranks(alignment)
        verdict = blame(alignment, camps)
        ranks = lagging or verdict.culprits
        lines = ", ".join(
            f"{c.phrase()}{at(call_location(alignment.by_rank[min(c)]))}" for c in camps
        )
        extra = f"; {lagging.phrase()} made a call too many before" if lagging else ""
        is_sure = lagging and grade_of(alignment, verdict) is not Grade.NOTE
        yield self.finding(
            f"{call_phrase(alignment.any_event)} comes from different lines: {lines}{extra}",
            ranks=ranks,
            step=step_of(alignment, ranks),
            location=location_in((lagging and alignment.parted) or alignment, ranks),
            severity=Severity.WARNING,
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.7 if is_sure else 0.2,
            evidence=camp_evidence(alignment, camps, call_phrase),
        )
