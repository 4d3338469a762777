"""SHD016: two patterns of a sharding plan say different things about one parameter."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.checks.shd.placements import clashes, faults_of
from distdiag.events.models import PlanFault
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.models import ProgramPlanView, RuleView


class AmbiguousPlanPattern(Check[RuleView | ProgramPlanView]):
    """Two patterns of a sharding plan say different things about one parameter.

    ## What you see
    A parameter is sharded, or replicated, against what one of the two patterns says, and no error
    tells so. The order of the patterns decides which one wins. `*` also matches dots, so a pattern
    often matches more names than intended.

    ## Example
        [plan]
        # wrong: the first pattern matches the experts, too
        "model.*.weight" = "Replicate over ep"
        "model.*.experts.*" = "Shard(0) over ep"
        # right
        "model.*.norm.weight" = "Replicate over ep"
        "model.*.experts.*" = "Shard(0) over ep"

    ## How to fix
    Narrow one of the two patterns, so that each parameter has one placement over each axis.

    Changes: The placement of the parameters that both patterns match, if the other pattern won.

    Leaves: Parameters that only one pattern matches.

    ## When it is not a defect
    No parameter has a name that both patterns match: compare the patterns with the names in
    `model.named_parameters()`.

    If so, add `ignore = ["SHD016"]` to `distdiag.toml`.

    ## References
    - https://docs.python.org/3/library/fnmatch.html
    """

    code = "SHD016"
    name = "ambiguous-plan-pattern"
    severity = Severity.WARNING

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Compare the rules of the table, or the patterns of the program's plan."""
        yield from self._of_table(view) if isinstance(view, RuleView) else self._of_program(view)

    def _of_table(self, view: RuleView) -> Iterator[Finding]:
        """Name the first parameter that each pair of rules disagrees about."""
        pairs: dict[tuple[str, str], list[str]] = {}
        first: dict[tuple[str, str], str] = {}
        for tensor, (rule, other), axis in clashes(view):
            pair = (rule.pattern, other.pattern)
            names = pairs.setdefault(pair, [])
            if tensor.plan.name not in names:
                names.append(tensor.plan.name)
            what = f'"{rule.pattern}" says {rule}, "{other.pattern}" says {other}'
            first.setdefault(pair, f"over {axis} two patterns of the [plan] table differ: {what}")
        for pair, names in pairs.items():
            yield self.finding(
                f"{first_and_more(tuple(names))}: {first[pair]}",
                ranks=view.world,
                subjects=tuple(names),
                evidence=tuple(
                    Evidence(ranks=view.world, summary=f"{name} fits both patterns")
                    for name in names[:5]
                ),
            )

    def _of_program(self, view: ProgramPlanView) -> Iterator[Finding]:
        """Name the parameters that an earlier pattern has taken."""
        faults = faults_of(view, PlanFault.CLASH)
        if not faults:
            return
        names = tuple(dict.fromkeys(each.fault.name for each in faults))
        pattern, fault, _ = faults[0]
        location = user_location(view.site.frames)
        yield self.finding(
            f'{first_and_more(names)} of {view.model}: "{pattern.pattern}" of the {view.source} '
            f"plan says {pattern.wanted}, {fault.text}",
            ranks=RankSet(rank for each in faults for rank in each.ranks),
            location=location,
            subjects=names,
            evidence=tuple(each.as_evidence(location) for each in faults[:5]),
        )
