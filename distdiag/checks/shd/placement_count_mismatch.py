"""SHD010: a parameter has not one placement for each dimension of its mesh."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more, location_on
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Severity
from distdiag.views.models import ModelView


class PlacementCountMismatch(Check[ModelView]):
    """A parameter has more or fewer placements than its mesh has dimensions.

    ## What you see
    Later operations fail with messages about placements that you did not write, or reduce over too
    few ranks. The tensor has no placement for some dimension of its mesh, or one too many.

    ## Example
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        # wrong: one placement for two dimensions
        weight = DTensor.from_local(shard, mesh, [Shard(0)])
        # right
        weight = DTensor.from_local(shard, mesh, [Replicate(), Shard(0)])

    ## How to fix
    Pass one placement for each dimension of the mesh, in the order of the mesh, with `Replicate()`
    where the tensor is not split: `distribute_tensor(tensor, mesh, [Shard(0), Replicate()])`.

    Changes: Which ranks hold which part, and over which ranks gradients are reduced.

    Leaves: Tensors that were already built from the wrong layout.

    ## When it is not a defect
    `len(tensor.placements)` equals `tensor.device_mesh.ndim`.

    If so, add `ignore = ["SHD010"]` to `distdiag.toml`.

    ## References
    - https://github.com/pytorch/torchtitan/issues/2329
    """

    code = "SHD010"
    name = "placement-count-mismatch"
    severity = Severity.ERROR

    def check(self, view: ModelView) -> Iterator[Finding]:
        """Count placements and dimensions."""
        wrong: dict[str, str] = {}
        ranks: set[int] = set()
        for rank, plans in view.by_rank.items():
            for plan in plans:
                if plan.mesh is not None and len(plan.placements) != len(plan.mesh.sizes):
                    ranks.add(rank)
                    wrong[plan.name] = f"({', '.join(plan.placements)}) on mesh {plan.mesh}"
        if not wrong:
            return
        names = tuple(wrong)
        where = RankSet(ranks)
        location = location_on(view, where)
        yield self.finding(
            f"{first_and_more(names)} of {view.model}: not one placement for each dimension of the "
            f"mesh: {wrong[names[0]]}",
            ranks=where,
            step=view.step,
            location=location,
            subjects=names,
            evidence=tuple(
                Evidence(ranks=where, summary=f"{name}: {what}", location=location)
                for name, what in list(wrong.items())[:5]
            ),
        )
