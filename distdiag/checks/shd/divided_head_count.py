"""SHD012: the number of heads is divided by the mesh although the projection is whole."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more, location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import ModelView


class DividedHeadCount(Check[ModelView]):
    """The number of attention heads is divided by the mesh although the projection is whole.

    ## What it detects
    A module of a sharded model that has fewer attention heads than when it was first used, or than
    the configuration says, by exactly the size of a mesh axis, while none of its own parameters is
    sharded.

    ## Why it matters
    Each rank computes all heads and cuts them as if they were a part: the heads are mixed up, and
    the model computes something else. Where shapes happen to fit nothing fails.

    ## Example
    A fix-up after `parallelize_module` that divides `num_heads` of every layer, with a plan that
    keeps the fused projection replicated.

    ## How to fix
    Divide the number only in modules whose projection the plan shards.

    ## References
    - NVIDIA-NeMo/Automodel#1519
    """

    code = "SHD012"
    name = "divided-head-count"
    severity = Severity.ERROR

    why = "The output of a replicated projection holds all heads on every rank."
    fix = "Leave the number of heads as it is, or shard the projection along the heads."
    fix_changes = "What attention computes: the result becomes that of one rank."
    fix_leaves = "Weights that were trained with the heads mixed up."
    disproof = "The projection of this module yields as many heads as its attribute says."

    def check(self, view: ModelView) -> Iterator[Finding]:
        """Name the parameters of the modules concerned."""
        divided: dict[str, int] = {}
        ranks: set[int] = set()
        for rank, plans in view.by_rank.items():
            for plan in plans:
                if plan.heads_divided_by > 1 and plan.is_parameter:
                    divided[plan.name] = plan.heads_divided_by
                    ranks.add(rank)
        if not divided:
            return
        names, where = tuple(divided), RankSet(ranks)
        location = location_on(view, where)
        yield self.finding(
            f"{first_and_more(names)} of {view.model} are whole on {where.phrase()}, but their "
            f"module has {divided[names[0]]} times fewer attention heads than before",
            ranks=where,
            step=view.step,
            location=location,
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=where,
                    summary=f"no parameter of the modules is sharded: {', '.join(names[:10])}",
                    location=location,
                ),
            ),
        )
