"""SHD014: a pattern of a sharding plan, or a name that DDP should ignore, matches nothing."""

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

    ## What you see
    A layer that the pattern should have sharded stays whole on every rank, so that memory runs out
    or shapes do not fit; a tensor that DDP should have ignored (experts) is averaged over ranks.
    Frameworks skip a name that does not exist, without an error.

    ## Example
        # wrong: the module is called `attention`
        plan = {"layers.*.attn.wq": ColwiseParallel()}
        # right
        plan = {"layers.*.attention.wq": ColwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)

    ## How to fix
    Write the names that the model has when the plan is applied (print
    `[name for name, _ in model.named_modules()]`), with prefixes of wrappers, for example
    `base_model.model.`. Or delete the pattern.

    Changes: Which tensors are sharded or left to each rank, and so memory, collectives and
    checkpoints.

    Leaves: Checkpoints that were written without the sharding.

    ## When it is not a defect
    The plan serves several models, and this model does not have the module.

    If so, add `ignore = ["SHD014"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    code = "SHD014"
    name = "unmatched-plan-pattern"
    severity = Severity.WARNING

    def check(self, view: RuleView | ProgramPlanView) -> Iterator[Finding]:
        """Match the rules of the table, or the patterns of the program's plan."""
        yield from self._of_table(view) if isinstance(view, RuleView) else self._of_program(view)

    def _of_table(self, view: RuleView) -> Iterator[Finding]:
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
                evidence=f"the names begin with {', '.join(names[:3])}",
            )

    def _of_program(self, view: ProgramPlanView) -> Iterator[Finding]:
        """Name the patterns that matched on no rank."""
        unmatched = [each.seen for each in view.patterns if each.num_matches == 0]
        if not unmatched:
            return
        # The plan of a library may cover models of several kinds.
        is_general = view.source is PlanSource.TRANSFORMERS or (
            view.source is PlanSource.PARALLELIZE_MODULE and not view.is_users_own
        )
        # A list of names may cover several ways to wrap one model.
        is_covered = view.source is PlanSource.DDP_IGNORED and len(unmatched) < len(view.patterns)
        kind = "list" if view.source is PlanSource.DDP_IGNORED else "plan"
        quoted = tuple(f'"{seen.pattern}"' for seen in unmatched)
        location = user_location(view.site.frames)
        yield self.finding(
            f"{first_and_more(quoted)} of the {view.source} {kind} for {view.model} match"
            f"{'es' if len(unmatched) == 1 else ''} nothing{_hint(unmatched[0].closest)}",
            ranks=view.ranks,
            location=location,
            subjects=tuple(seen.pattern for seen in unmatched),
            grade=Grade.NOTE if is_general or is_covered else Grade.PROVEN,
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
