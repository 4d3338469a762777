"""SHD015: a tensor is not placed as the sharding plan says."""

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

    ## What you see
    Memory, collectives and gradients differ from what you planned: one rank may train a few experts
    as if they were all experts, or nothing reduces partial sums. The code that shards the model has
    its own configuration, and it does not match the plan.

    ## Example
        # wrong: loading with assign=True replaces the sharded parameters by whole ones
        parallelize_module(model, mesh["tp"], plan)
        model.load_state_dict(state, assign=True)
        # right
        model.load_state_dict(state, assign=True)
        parallelize_module(model, mesh["tp"], plan)

    ## How to fix
    Apply the plan after everything that replaces parameters (loading, tying, wrapping). Or, if the
    model is right, correct the rule in `[plan]` of `distdiag.toml`.

    Changes: Which ranks hold which part, and over which ranks gradients are reduced.

    Leaves: Checkpoints that were written with the wrong placement.

    ## When it is not a defect
    `parameter.placements` and `parameter.device_mesh` are as intended. Then correct the rule in
    `[plan]`.

    If so, add `ignore = ["SHD015"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.tensor.html
    - https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    code = "SHD015"
    name = "placement-contradiction"
    severity = Severity.ERROR

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Compare tensors with the table, or with the program's plan."""
        yield from self._of_table(view) if isinstance(view, RuleView) else self._of_program(view)

    def _of_table(self, view: RuleView) -> Iterator[Finding]:
        """Compare the tensors with the rules; what is unsure is a finding of its own."""
        found = list(contradictions(view))
        sure = [each for each in found if each.grade is not Grade.NOTE]
        unsure = [each for each in found if each.grade is Grade.NOTE]
        for group in (sure, unsure):
            if group:
                yield self._of_rules(group)

    def _of_rules(self, found: list[Contradiction]) -> Finding:
        names = tuple(dict.fromkeys(each.tensor.plan.name for each in found))
        first = found[0]
        doubt = "" if first.grade is not Grade.NOTE else ", as far as the tensor shows"
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

    def _of_program(self, view: ProgramPlanView) -> Iterator[Finding]:
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
