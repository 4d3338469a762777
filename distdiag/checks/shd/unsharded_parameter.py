"""SHD018: parts of a sharded model belong to no module that was wrapped, or all to one."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more, location_on
from distdiag.events.models import ReplicaEvidence, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import ModelView

_BLOCK: Final = re.compile(r"(.*?)\.\d+\.(.*)")
_FEWEST_BLOCKS: Final = 4
_LARGE: Final = 1 << 20


class UnshardedParameter(Check[ModelView]):
    """Parts of a sharded model belong to no wrapped module, or the whole model to a single one.

    ## What you see
    Each rank trains its own version of these parameters, or memory peaks at the size of the whole
    model. FSDP2 manages only the modules on which `fully_shard` was called: it does not reduce the
    gradients of parameters outside, and gathers all parameters of one unit at once.

    ## Example
        # wrong: embedding and head are left out
        for layer in model.layers:
            fully_shard(layer)
        # right
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    ## How to fix
    Call `fully_shard(block)` on each block first, and `fully_shard(model)` on the root last.

    Changes: The parameters become shards, and their gradients are reduced; units are gathered one
    by one.

    Leaves: Copies that have already diverged, and parameters that were ignored on purpose.

    ## When it is not a defect
    The program reduces the gradients of these parameters itself before each step, or the whole
    model fits into memory as one unit.

    If so, add `ignore = ["SHD018"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    code = "SHD018"
    name = "unsharded-parameter"
    severity = Severity.INFO

    def check(self, view: ModelView) -> Iterator[Finding]:
        """Look for what is outside all units, and for a unit that is all."""
        sharded = {rank: plans for rank, plans in view.by_rank.items() if any(map(_is_in, plans))}
        outside = {rank: [p.name for p in plans if _is_out(p)] for rank, plans in sharded.items()}
        ranks = RankSet(rank for rank, names in outside.items() if names)
        if ranks:
            names = tuple(outside[min(ranks)])
            yield self._note(
                view,
                ranks,
                f"{first_and_more(names)} of {view.model} belong to no module that was sharded: "
                "FSDP2 does not reduce their gradients",
                names,
            )
        large = RankSet(rank for rank, plans in sharded.items() if _is_one_unit(plans))
        if large:
            yield self._note(
                view,
                large,
                f"{view.model} is one unit although it has repeated blocks: all "
                "its parameters are gathered at once",
                (view.model,),
            )

    def _note(
        self, view: ModelView, ranks: RankSet, message: str, subjects: tuple[str, ...]
    ) -> Finding:
        return self.finding(
            message,
            ranks=ranks,
            step=view.step,
            location=location_on(view, ranks),
            subjects=subjects,
            grade=Grade.NOTE,
            confidence=0.7,
            evidence=message,
        )


def _is_in(plan: TensorPlan) -> bool:
    return plan.is_parameter and plan.wrapper == "FSDP2"


def _is_out(plan: TensorPlan) -> bool:
    is_alone = not plan.wrapper and plan.mesh is None and plan.evidence is ReplicaEvidence.MODEL
    return plan.is_parameter and plan.requires_grad and is_alone and not plan.is_late


def _is_one_unit(plans: Sequence[TensorPlan]) -> bool:
    inside = [plan for plan in plans if _is_in(plan)]
    if len({plan.unit for plan in inside}) > 1:
        return False
    parts = [match.groups() for plan in inside if (match := _BLOCK.fullmatch(plan.name))]
    num_blocks = max(map(parts.count, set(parts)), default=0)
    return num_blocks >= _FEWEST_BLOCKS and sum(math.prod(p.shape) for p in inside) >= _LARGE
