"""Device meshes as values, and which of their ranks hold the same part of a tensor."""

from typing import Any, Final

from distdiag.events.models import Mesh
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped

_KNOWN: Final[WeakMap[Any, Mesh]] = WeakMap()
"""A mesh never changes, and torch makes the tensor of its ranks anew each time it is asked."""


def mesh_of(mesh: Untyped) -> Mesh:
    """Return a mesh as a value."""
    known = _KNOWN.get(mesh)
    if known is None:
        ranks = mesh.mesh
        names = mesh.mesh_dim_names or tuple(f"dim{index}" for index in range(ranks.ndim))
        known = Mesh(tuple(names), tuple(ranks.shape), tuple(ranks.flatten().tolist()))
        _KNOWN[mesh] = known
    return known


def replicas_on_mesh(device_mesh: Untyped, placements: Untyped) -> tuple[int, ...]:
    """Return the ranks that differ from this one only along axes where a tensor is replicated."""
    mesh, here = mesh_of(device_mesh), device_mesh.get_coordinate()
    is_whole = len(placements) == len(mesh.sizes)
    if here is None or not is_whole or any(p.is_partial() for p in placements):
        return ()
    places = [0]
    for size, at, placement in zip(mesh.sizes, here, placements, strict=True):
        along = range(size) if placement.is_replicate() else [at]
        places = [place * size + index for place in places for index in along]
    return tuple(sorted(mesh.ranks[place] for place in places))
