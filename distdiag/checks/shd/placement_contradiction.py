"""SHD015: a tensor is not placed as the sharding plan says."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.checks.shd.placements import Contradiction, contradictions, faults_of
from distdiag.events.models import PlanFault
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ProgramPlanView, RuleView


class PlacementContradiction(Check[RuleView | ProgramPlanView]):
    """A tensor is not placed as the sharding plan says.

    ## What it detects
    A parameter that a rule of the `[plan]` table matches and whose DTensor has another placement,
    lies on a mesh without the axis, or is whole on every rank; a parameter that a program's own
    plan matched and that is whole afterwards, or is whole again after the first step.

    ## Why it matters
    Every rank then keeps, computes and reduces something else than was planned: experts that are
    trained by one rank as if they were all of them, partial sums that nobody reduces.

    ## Example
    `"model.layers.*.mlp.experts.*" = "Shard(0) over ep"`, and the experts are replicated over `ep`;
    `load_state_dict(..., assign=True)` after `parallelize_module`.

    ## How to fix
    Apply the plan before anything that replaces parameters, or correct the plan.

    ## References
    - `torch.distributed.tensor.placement_types`, `torch.distributed.device_mesh`
    """

    code = "SHD015"
    name = "placement-contradiction"
    severity = Severity.ERROR

    why = (
        "What shards a model goes by its own configuration, and nothing compares it with the plan."
    )
    fix = "Shard the parameter as the plan says, or write down how it is meant to be sharded."
    fix_changes = "Which ranks hold which part, and over whom gradients are reduced."
    fix_leaves = "Checkpoints that were written with the other placement."
    disproof = "`parameter.placements` and `parameter.device_mesh` are as the plan says."

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case RuleView():
                yield from self._check_rules(view)
            case ProgramPlanView():
                yield from self._check_program_plan(view)

    def _check_rules(self, view: RuleView) -> Iterator[Finding]:
        """Compare the tensors with the rules; what is unsure stands apart."""
        found = list(contradictions(view))
        sure = [each for each in found if each.grade is not Grade.NOTE]
        unsure = [each for each in found if each.grade is Grade.NOTE]
        for group in (sure, unsure):
            if group:
                yield self._of_rules(group)

    def _of_rules(self, found: list[Contradiction]) -> Finding:
        names = tuple(dict.fromkeys(each.tensor.plan.name for each in found))
        first = found[0]
        doubt = "" if first.grade is not Grade.NOTE else ", as far as the tensor tells"
        return self.finding(
            f"{first_and_more(names)} of {first.tensor.model}: the [plan] table says {first.rule}, "
            f"there is {first.actual}{doubt}",
            ranks=RankSet(rank for each in found for rank in each.tensor.ranks),
            subjects=names,
            grade=first.grade,
            confidence=0.95 if first.grade is Grade.PROVEN else 0.7,
            evidence=tuple(
                Evidence(
                    ranks=each.tensor.ranks,
                    summary=f"{each.tensor.plan.name} {list(each.tensor.plan.shape)}: expected "
                    f'{each.rule} by "{each.rule.pattern}", found {each.actual}',
                )
                for each in found[:5]
            ),
        )

    def _check_program_plan(self, view: ProgramPlanView) -> Iterator[Finding]:
        """Name what is whole although the program's plan has matched it."""
        faults = faults_of(view, PlanFault.UNLIKE)
        if not faults:
            return
        names = tuple(dict.fromkeys(each.fault.name for each in faults))
        location = user_location(view.site.frames)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: the {view.source} plan says "
            f"{faults[0].pattern.wanted}, {faults[0].fault.text}",
            ranks=RankSet(rank for each in faults for rank in each.ranks),
            location=location,
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(each.as_evidence(location) for each in faults[:5]),
        )
