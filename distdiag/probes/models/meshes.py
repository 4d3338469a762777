"""Device meshes as values, and which of their ranks hold the same part of a tensor."""

import sys
from types import FrameType
from typing import Any, ClassVar, Final

from torch.distributed import device_mesh

from distdiag.events.models import Mesh, ObjectKind
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.creations import Creations
from distdiag.probes.guard import guarded
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder

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


# Where meshes are made.


class DeviceMeshes(Probe):
    """Writes down which line of the user's code makes a mesh, by its name and those of its axes."""

    name: ClassVar[str] = "device-meshes"

    def __init__(self, recorder: Recorder, creations: Creations) -> None:
        super().__init__(recorder)
        self._creations = creations

    def _install(self) -> None:
        self._patches.wrap_everywhere(device_mesh, "init_device_mesh", self._wrapper)

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def init_device_mesh(*args: object, **kwargs: object) -> object:
            mesh = original(*args, **kwargs)
            self._made(mesh, sys._getframe(1))
            return mesh

        return init_device_mesh

    @guarded
    def _made(self, made: Untyped, frame: FrameType) -> None:
        self._creations.note(made, frame)
        mesh = mesh_of(made)
        axes = zip(mesh.names, mesh.sizes, strict=True)
        for name in {str(mesh), *(f"{axis}={size}" for axis, size in axes)}:
            self._creations.tell(ObjectKind.MESH, name, made)
