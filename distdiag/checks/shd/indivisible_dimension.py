"""SHD017: what a plan splits evenly cannot be divided by the size of the axis."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.checks.shd.placements import Uneven, faults_of, uneven
from distdiag.events.models import PlanFault, PlanSource
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ProgramPlanView, RuleView


class IndivisibleDimension(Check[RuleView | ProgramPlanView]):
    """What a plan splits evenly cannot be divided by the size of the axis.

    ## What it detects
    Experts that a plan shards over an expert-parallel axis whose size does not divide their number;
    projections of attention that a plan splits over more ranks than divide their heads, while the
    program takes the parts as plain tensors.

    ## Why it matters
    Expert parallelism computes who owns an expert from the number of experts of each rank, and
    attention cuts its part into heads. With uneven parts tokens go to the wrong expert, or a head
    is cut in two.

    ## Example
    Six key-value heads under `ColwiseParallel` over four ranks.

    ## How to fix
    Choose a size of the axis that divides the number, or replicate what cannot be split.

    ## References
    - `torch.chunk`: the last part of an uneven division is smaller, or missing
    """

    code = "SHD017"
    name = "indivisible-dimension"
    severity = Severity.WARNING

    why = "DTensor and FSDP2 allow uneven parts, but the code around these expects equal ones."
    fix = "Use an axis whose size divides the number of experts or heads."
    fix_changes = "The shape of the mesh, and with it which ranks hold which part."
    fix_leaves = "Checkpoints that hold the uneven parts."
    disproof = "The number of experts or heads is a multiple of the size of the axis."

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case RuleView():
                yield from self._check_rules(view)
            case ProgramPlanView():
                yield from self._check_program_plan(view)

    def _check_rules(self, view: RuleView) -> Iterator[Finding]:
        """Divide what the rules split; other axes than that of experts may be uneven."""
        found = list(uneven(view))
        sure = [each for each in found if each.is_expert]
        for group in (sure, [each for each in found if not each.is_expert]):
            if group:
                yield self._of_rules(group)

    def _of_rules(self, found: list[Uneven]) -> Finding:
        names = tuple(dict.fromkeys(each.tensor.plan.name for each in found))
        return self.finding(
            f"{first_and_more(names)}: the [plan] table says {found[0].rule}, but {found[0].text}",
            ranks=RankSet(rank for each in found for rank in each.tensor.ranks),
            subjects=names,
            grade=Grade.LIKELY if found[0].is_expert else Grade.NOTE,
            confidence=0.85 if found[0].is_expert else 0.5,
            evidence=tuple(
                Evidence(ranks=each.tensor.ranks, summary=f"{each.tensor.plan.name}: {each.text}")
                for each in found[:5]
            ),
        )

    def _check_program_plan(self, view: ProgramPlanView) -> Iterator[Finding]:
        """Name what the program's plan cannot split evenly."""
        faults = faults_of(view, PlanFault.UNEVEN)
        if not faults:
            return
        names = tuple(dict.fromkeys(each.fault.name for each in faults))
        location = user_location(view.site.frames)
        # transformers itself copes with heads that it cannot split.
        is_note = view.source is PlanSource.TRANSFORMERS
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: the {view.source} plan says "
            f"{faults[0].pattern.wanted}, but {faults[0].fault.text}",
            ranks=RankSet(rank for each in faults for rank in each.ranks),
            location=location,
            subjects=names,
            grade=Grade.NOTE if is_note else Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(each.as_evidence(location) for each in faults[:5]),
        )
