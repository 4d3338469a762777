"""COL007: ranks call the same collective for different modules, or from different lines."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.col.mismatch import CallMismatch, each_group
from distdiag.checks.shared.culprits import (
    blame,
    grade_of,
    group_by,
    group_evidence,
    location_in,
    step_of,
)
from distdiag.checks.shared.explanations import (
    explain,
    groups_by_place,
    is_by_role,
    lagging_ranks,
    unexplained,
)
from distdiag.events.collectives import Collective, stands_in
from distdiag.findings.descriptions import at, call_location, call_phrase
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import CollectiveView
from distdiag.views.invariants import Aspect, clean_module, contradiction

_NO_MODULE: Final = "?"
_OF_LINES: Final = (
    "Ranks pair collectives by their order alone, and these calls agree in kind and size. If the "
    "lines are not meant for each other, the results are mixed, and nothing fails."
)
_IF_MEANT: Final = "Nothing, if these lines belong together. Else:"
"""What is said where only lines differ."""


class CollectiveCallSiteMismatch(CallMismatch):
    """Ranks call the same collective for different modules, or from different lines.

    ## What you see
    Nothing hangs and nothing fails, but the results are wrong: shards of different parameters, or
    different metrics, are mixed. Ranks pair collectives by their order alone, and these calls
    happen to agree in kind and size.

    ## Example
        # wrong: the order depends on the rank's batch, so one rank gathers `image`, another `text`
        for name in batch.modalities():
            model.adapters[name](batch)

        # right: one order on all ranks
        for name in sorted(model.adapters):
            model.adapters[name](batch)

    ## How to fix
    Make the calls in the same order on every rank: loop over `sorted(names)` instead of over what
    the local data holds. If only one rank makes an extra call, let all ranks make this call, or
    none.

    Changes: The results: what was computed so far used mixed values.

    Leaves: Weights and optimizer state that already contain wrong values: restart from a checkpoint
    from before.

    ## When it is not a defect
    The records show the same module, and the same line, on all ranks of this call.

    Both branches of an `if` may call the same collective: different lines alone are a note. To
    silence it, set `ignore = ["COL007"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/75902
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "COL007"
    name = "collective-call-site-mismatch"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView) -> Iterator[Finding]:
        """Compare what the calls are for, then look for a rank that lags behind by a call."""
        if unexplained(alignment) is Aspect.MODULE:
            yield self._differing_modules(alignment)
        elif alignment.kind == "collective" and contradiction(alignment) is None:
            yield from self._differing_lines(alignment)

    def _differing_modules(self, alignment: CollectiveView) -> Finding:
        groups = group_by(alignment, _module)
        names = sorted(_module(alignment.by_rank[min(group)]) for group in groups)
        modules = each_group(alignment, groups, _module)
        return self.mismatch(
            alignment,
            groups,
            f"{call_phrase(alignment.any_event)} mixes the parameters of different modules: "
            f"{modules}",
            lambda call: f"is for module {_module(call)}",
            subjects=tuple(names),
        )

    def _differing_lines(self, alignment: CollectiveView) -> Iterator[Finding]:
        groups = groups_by_place(alignment)
        own = [group for group in groups if not stands_in(alignment.by_rank[min(group)].site)]
        if len(own) < 2 or explain(alignment) is not None:
            return
        lagging = lagging_ranks(alignment)
        modules = {_module(alignment.by_rank[min(group)]) for group in own}
        is_of_one = len(modules) == 1 and modules != {_NO_MODULE}
        if not lagging and (is_of_one or is_by_role(alignment)):
            return  # the shards of one module from whichever branch, or a root and its receivers
        verdict = blame(alignment, groups)
        ranks = lagging or verdict.culprits
        lines = ", ".join(
            f"{group.phrase()}{at(call_location(alignment.by_rank[min(group)]))}"
            for group in groups
        )
        extra = f"; {lagging.phrase()} made an extra call before" if lagging else ""
        # Lines alone prove nothing: both branches of an `if` may well broadcast.
        is_sure = lagging and grade_of(alignment, verdict) is not Grade.NOTE
        yield self.finding(
            f"{call_phrase(alignment.any_event)} comes from different lines: {lines}{extra}",
            ranks=ranks,
            step=step_of(alignment, ranks),
            location=location_in((lagging and alignment.parted) or alignment, ranks),
            severity=Severity.WARNING,
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.7 if is_sure else 0.2,
            evidence=group_evidence(alignment, groups, call_phrase),
            why=self.why if is_sure else _OF_LINES,
            fix=self.fix if is_sure else f"{_IF_MEANT} {self.fix}",
        )


def _module(call: Collective) -> str:
    return clean_module(call.site.module) or _NO_MODULE
