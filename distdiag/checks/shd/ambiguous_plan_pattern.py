"""SHD016: two patterns of a sharding plan say different things about one parameter."""

from __future__ import annotations

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

    ## What it detects
    Two rules of the `[plan]` table that match one parameter and want different placements over the
    same axis; two patterns of a framework's plan of which the first one takes a parameter that the
    second one would shard otherwise.

    ## Why it matters
    Which pattern wins depends on the order in which they are written down. `*` crosses dots, so
    that a pattern often matches more than it was written for.

    ## Example
    `"model.*.weight" = "Replicate over ep"` beside `"model.*.experts.*" = "Shard(0) over ep"`.

    ## How to fix
    Narrow one of the patterns so that only one of them matches.

    ## References
    - `fnmatch` of the standard library: `*` matches everything
    """

    code = "SHD016"
    name = "ambiguous-plan-pattern"
    severity = Severity.WARNING

    why = "A parameter can be placed in one way only, and the plan names two."
    fix = "Narrow one of the patterns, so that each parameter has one placement over each axis."
    fix_changes = "The placement of the parameters that both patterns match, if the other one won."
    fix_leaves = "Parameters that neither pattern matches."
    disproof = "No parameter has a name that both patterns match."

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case RuleView():
                yield from self._check_rules(view)
            case ProgramPlanView():
                yield from self._check_program_plan(view)

    def _check_rules(self, view: RuleView) -> Iterator[Finding]:
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

    def _check_program_plan(self, view: ProgramPlanView) -> Iterator[Finding]:
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
