"""SHD012: the number of heads is divided by the mesh although the projection is whole."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more, location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import ModelView


class DividedHeadCount(Check[ModelView]):
    """The number of attention heads is divided by the mesh although the projection is whole.

    ## What you see
    Attention mixes its heads up, and the loss differs from that of one rank without any error. The
    projection of this module is whole on each rank, but the module has divided its number of heads
    by the size of the mesh and cuts the result as if it were a part.

    ## Example
        # wrong: the plan keeps the fused projection `qkv` replicated
        for layer in model.layers:
            layer.attention.num_heads //= mesh["tp"].size()
        # right
        for layer in model.layers:
            if isinstance(layer.attention.qkv.weight, DTensor):
                layer.attention.num_heads //= mesh["tp"].size()

    ## How to fix
    Keep the full number of heads in modules whose projection is whole. Or shard the projection
    along the heads (`ColwiseParallel()` in the plan of `parallelize_module`).

    Changes: The result of attention: it becomes that of one rank.

    Leaves: Weights that were trained while the heads were mixed up.

    ## When it is not a defect
    The projection of this module returns exactly as many heads as the module's attribute says.

    If so, add `ignore = ["SHD012"]` to `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA-NeMo/Automodel/issues/1519
    """

    code = "SHD012"
    name = "divided-head-count"
    severity = Severity.ERROR

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
        yield self.finding(
            f"{first_and_more(names)} of {view.model} are whole on {where.phrase()}, but their "
            f"module has {divided[names[0]]} times fewer attention heads than before",
            ranks=where,
            step=view.step,
            location=location_on(view, where),
            subjects=names,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=f"no parameter of the modules is sharded: {', '.join(names[:10])}",
        )
