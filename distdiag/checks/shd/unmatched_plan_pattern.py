"""SHD014: a pattern of a sharding plan matches nothing."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.config.placement_rules import closest, matches
from distdiag.events.models import PlanSource
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ProgramPlanView, RuleView


class UnmatchedPlanPattern(Check[RuleView | ProgramPlanView]):
    """A pattern of a sharding plan matches nothing.

    ## What it detects
    A pattern of the `[plan]` table, of the dict given to `parallelize_module`, or of a framework's
    parallel plan that no parameter or module has, on any rank and in any model that the same line
    applies it to.

    ## Why it matters
    Frameworks skip such a pattern without an error. What it should have sharded stays whole on
    every rank: memory runs out, or replicated weights meet activations that are sharded.

    ## Example
    `{"layers.*.attn.wq": ColwiseParallel()}` for a model whose module is called `attention`, or a
    plan without the prefix `base_model.model.` that an adapter library puts in front.

    ## How to fix
    Write the names that the model has at the moment when the plan is applied, wrappers included.

    ## References
    - `torch.distributed.tensor.parallel.parallelize_module`: no match is a warning
    """

    code = "SHD014"
    name = "unmatched-plan-pattern"
    severity = Severity.WARNING

    why = "Plans are matched by name, and a name that is not there is skipped."
    fix = "Correct the pattern, or leave it out."
    fix_changes = "Which tensors are sharded, and so memory, collectives and checkpoints."
    fix_leaves = "Checkpoints that were written without the sharding."
    disproof = "A parameter or module of the model whose name fits the pattern."

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Judge what the view shows."""
        match view:
            case RuleView():
                yield from self._check_rules(view)
            case ProgramPlanView():
                yield from self._check_program_plan(view)

    def _check_rules(self, view: RuleView) -> Iterator[Finding]:
        """Match the rules of the table against the names of all tensors."""
        names = tuple(dict.fromkeys(tensor.plan.name for tensor in view.tensors))
        models = ", ".join(dict.fromkeys(tensor.model for tensor in view.tensors))
        for rule in view.rules:
            if any(matches(rule.pattern, name) for name in names):
                continue
            yield self.finding(
                f'"{rule.pattern}" of the [plan] table matches none of {len(names)} tensors of '
                f"{models}{_hint(closest(rule.pattern, names))}",
                ranks=view.world,
                subjects=(rule.pattern,),
                evidence=(
                    Evidence(
                        ranks=view.world,
                        summary=f"the names begin with {', '.join(names[:3])}",
                    ),
                ),
            )

    def _check_program_plan(self, view: ProgramPlanView) -> Iterator[Finding]:
        """Name the patterns that matched on no rank."""
        unmatched = [each.seen for each in view.patterns if each.num_matches == 0]
        if not unmatched:
            return
        # The plan of a library may cover models of several kinds.
        is_general = view.source is PlanSource.TRANSFORMERS or (
            view.source is PlanSource.PARALLELIZE_MODULE and not view.is_users_own
        )
        quoted = tuple(f'"{seen.pattern}"' for seen in unmatched)
        location = user_location(view.site.frames)
        yield self.finding(
            f"{first_and_more(quoted)} of the {view.source} plan for {view.model} match"
            f"{'es' if len(unmatched) == 1 else ''} nothing{_hint(unmatched[0].closest)}",
            ranks=view.ranks,
            location=location,
            subjects=tuple(seen.pattern for seen in unmatched),
            grade=Grade.NOTE if is_general else Grade.PROVEN,
            evidence=tuple(
                Evidence(
                    ranks=view.ranks,
                    summary=f'"{seen.pattern}" ({seen.wanted}): no match{_hint(seen.closest)}',
                    location=location,
                )
                for seen in unmatched[:5]
            ),
        )


def _hint(name: str) -> str:
    return f'; "{name}" is there' if name else ""
