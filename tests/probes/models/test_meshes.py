"""Device meshes as values."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from distdiag.events.models import Mesh
from distdiag.probes.models.meshes import mesh_of, replicas_on_mesh


def test_a_mesh_is_asked_for_its_ranks_once(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    assert mesh_of(mesh) == Mesh(("dp",), (2,), (0, 1))
    assert mesh_of(mesh) is mesh_of(mesh)


def test_a_mesh_with_other_names_is_another_one(fake_group: None) -> None:
    mesh_of(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))

    assert mesh_of(init_device_mesh("cpu", (1, 2))) == Mesh(("dim0", "dim1"), (1, 2), (0, 1))


def test_ranks_along_replicated_axes_hold_the_same(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 2))

    assert replicas_on_mesh(mesh, (Shard(0), Replicate())) == (0, 1)
    assert replicas_on_mesh(mesh, (Replicate(), Shard(0))) == (0,)
    assert replicas_on_mesh(mesh, (Replicate(), Partial())) == ()
    assert replicas_on_mesh(mesh, (Replicate(),)) == ()
