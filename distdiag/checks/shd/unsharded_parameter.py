"""SHD018: parts of a sharded model belong to no module that was wrapped, or all to one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more, location_on
from distdiag.events.models import Basis, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ModelView

_BLOCK: Final = re.compile(r"(.*?)\.\d+\.(.*)")
_FEWEST_BLOCKS: Final = 4
_LARGE: Final = 1 << 20


class UnshardedParameter(Check[ModelView]):
    """Parts of a sharded model belong to no module that was wrapped, or all to one.

    ## What it detects
    When a model that FSDP2 shards is used for the first time: trainable parameters that belong to
    no module that was wrapped, and large models of repeated blocks that were wrapped as one unit.

    ## Why it matters
    FSDP2 serves what lies below the modules it was called on. It neither broadcasts nor reduces
    other parameters, and each rank trains its own. Of a single unit all parameters are gathered at
    once, so that the peak of memory is that of the whole model and nothing overlaps.

    ## Example
    `for layer in model.layers: fully_shard(layer)` without `fully_shard(model)`: the embedding and
    the head are left out.

    ## How to fix
    Call `fully_shard` on each block first and on the root last.

    ## References
    - `torch.distributed.fsdp.fully_shard`
    """

    code = "SHD018"
    name = "unsharded-parameter"
    severity = Severity.INFO

    why = "FSDP2 manages the parameters below the modules that it was called on, and no others."
    fix = "Call `fully_shard(model)` once more, on the root, after its blocks."
    fix_changes = "The parameters become shards, and their gradients are reduced."
    fix_leaves = "Copies that differ already, and parameters that were ignored on purpose."
    disproof = "The program reduces the gradients of these parameters itself before each step."

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
                "nobody reduces their gradients unless the program does",
                names,
            )
        large = RankSet(rank for rank, plans in sharded.items() if _is_one_unit(plans))
        if large:
            yield self._note(
                view,
                large,
                f"{view.model} is one unit though it is made of repeated blocks: all its "
                "parameters are gathered at once",
                why="A unit is gathered before its forward pass and kept until its end.",
                fix="Call `fully_shard` on each block, and on the root last.",
                fix_changes="Peak memory, and the order and size of the collectives.",
                fix_leaves="The results: they are the same.",
                disproof="The whole model fits, and the gathering takes no time that matters.",
            )

    def _note(
        self,
        view: ModelView,
        ranks: RankSet,
        message: str,
        names: tuple[str, ...] = (),
        **texts: Any,  # noqa: ANN401
    ) -> Finding:
        location = location_on(view, ranks)
        return self.finding(
            message,
            ranks=ranks,
            step=view.step,
            location=location,
            subjects=names or (view.model,),
            grade=Grade.NOTE,
            confidence=0.7,
            evidence=(Evidence(ranks=ranks, summary=message, location=location),),
            **texts,
        )


def _is_in(plan: TensorPlan) -> bool:
    return plan.is_parameter and plan.keeper == "FSDP2"


def _is_out(plan: TensorPlan) -> bool:
    is_alone = not plan.keeper and plan.mesh is None and plan.basis is Basis.MODEL
    return plan.is_parameter and plan.requires_grad and is_alone and not plan.is_late


def _is_one_unit(plans: Sequence[TensorPlan]) -> bool:
    inside = [plan for plan in plans if _is_in(plan)]
    if len({plan.unit for plan in inside}) > 1:
        return False
    parts = [match.groups() for plan in inside if (match := _BLOCK.fullmatch(plan.name))]
    num_blocks = max(map(parts.count, set(parts)), default=0)
    return num_blocks >= _FEWEST_BLOCKS and sum(math.prod(p.shape) for p in inside) >= _LARGE
