"""SHD017: what a plan splits evenly cannot be divided by the size of the axis."""

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

    ## What you see
    Tokens go to the wrong expert, or an attention head is cut in two. DTensor and FSDP2 accept
    parts of different sizes, but expert parallelism and attention expect equal parts.

    ## Example
        # wrong: 6 key-value heads over 4 ranks
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
        parallelize_module(attention, mesh["tp"], {"wk": ColwiseParallel()})
        # right: 6 heads over 2 ranks
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(attention, mesh["tp"], {"wk": ColwiseParallel()})

    ## How to fix
    Choose an axis whose size divides the number of experts or heads. Or replicate the parameter
    over this axis.

    Changes: The shape of the mesh, and with it which ranks hold which part.

    Leaves: Checkpoints that hold the uneven parts.

    ## When it is not a defect
    The code that uses the parts takes their real sizes, as `DTensor` operations do.

    If so, add `ignore = ["SHD017"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.chunk.html
    """

    code = "SHD017"
    name = "indivisible-dimension"
    severity = Severity.WARNING

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Divide what the table splits, or what the program's plan splits."""
        yield from self._of_table(view) if isinstance(view, RuleView) else self._of_program(view)

    def _of_table(self, view: RuleView) -> Iterator[Finding]:
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

    def _of_program(self, view: ProgramPlanView) -> Iterator[Finding]:
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
