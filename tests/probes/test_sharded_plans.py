from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdiag.events.models import Mesh, Policy, ReplicaEvidence, TensorPlan
from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.models.wrappers import WrapTimes
from tests.probes.sample_models import FOUR, PAIR, network, plans


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """A mesh of two by two ranks, of which only rank 0 exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


# FSDP2


def test_fully_shard_on_one_axis(fake_group: None) -> None:
    model = network()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))

    found = plans(model)

    assert found["0.weight"] == TensorPlan(
        "0.weight",
        (3, 2),  # of the whole, though three rows do not part evenly
        "float32",
        requires_grad=True,
        wrapper="FSDP2",
        unit="0",
        placements=("S(0)",),
        mesh=Mesh(("dp",), (2,), PAIR),
        replicas=(0,),
        evidence=ReplicaEvidence.MESH,
        policy=Policy(reshard_after_forward="True"),
    )
    assert (found["1.weight"].wrapper, found["1.weight"].unit) == ("FSDP2", "")


def test_the_policy_of_each_unit_of_fsdp2(four_ranks: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    flat = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=flat, mp_policy=mixed)
    fully_shard(model[1], mesh=flat, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model[2], mesh=flat, reshard_after_forward=2)
    fully_shard(model, mesh=flat, reshard_after_forward=False)

    found = plans(model)

    assert [found[f"{unit}.weight"].policy for unit in range(3)] == [
        Policy("bfloat16", "float32", "", "True"),
        Policy("", "", "cpu", "True"),
        Policy("", "", "", "2"),
    ]


def test_buffers_of_a_sharded_model_are_whole_on_each_rank(fake_group: None) -> None:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    buffer = plans(model)["1.running_mean"]

    assert (buffer.replicas, buffer.evidence, buffer.mesh) == (PAIR, ReplicaEvidence.WRAPPER, None)


def test_the_plan_is_the_same_while_parameters_are_gathered(fake_group: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    before = plans(model)

    loss = model(torch.ones(1, 4)).sum()

    assert not isinstance(model[0].weight, DTensor)
    assert plans(model) == before
    loss.backward()
    assert plans(model) == before


def test_a_hybrid_mesh_replicates_over_its_first_axis(four_ranks: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=four_ranks)

    weight = plans(model, world=FOUR)["weight"]

    assert weight.placements == ("R", "S(0)")
    assert weight.replicas == (0, 2)
    assert weight.mesh == Mesh(("dp", "tp"), (2, 2), FOUR)


def test_tied_weights_are_known_when_they_are_shards(fake_group: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    assert plans(model)["1.weight"].tied_to == "0.weight"


def sharded_by(wrap_times: WrapTimes, **values: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), **values)
    wrap_times.wrapped(model)
    return model


def test_a_parameter_that_came_after_sharding_is_late(fake_group: None) -> None:
    times = WrapTimes()
    model = sharded_by(times)
    model[0].lora = nn.Parameter(torch.ones(2))
    model[1].adapter = nn.Linear(4, 4)

    found = plans(model, wrap_times=times)

    late = [name for name, plan in found.items() if plan.is_late]
    assert late == ["0.lora", "1.adapter.weight", "1.adapter.bias"]
    assert (found["0.lora"].wrapper, found["0.lora"].replicas) == ("", PAIR)
    assert found["0.lora"].evidence is ReplicaEvidence.WRAPPER


def test_a_parameter_that_sharding_was_told_to_ignore_is_not_late(fake_group: None) -> None:
    times, model = WrapTimes(), nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
    times.wrapped(model)

    bias = plans(model, wrap_times=times)["0.bias"]

    assert (bias.is_late, bias.wrapper, bias.replicas) == (False, "", ())


def test_a_late_buffer_is_no_late_parameter(fake_group: None) -> None:
    times = WrapTimes()
    model = sharded_by(times)
    model.register_buffer("mask", torch.ones(2))

    assert not plans(model, wrap_times=times)["mask"].is_late


# Tensors on a mesh


def on_mesh(mesh: DeviceMesh, *placements: Any) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, list(placements)))
    model.scale = nn.Parameter(torch.ones(4))
    return model


@pytest.mark.parametrize(
    ("placements", "replicas"),
    [
        ((Replicate(), Shard(0)), (0, 2)),
        ((Shard(1), Replicate()), (0, 1)),
        ((Replicate(), Replicate()), FOUR),
        ((Shard(0), Shard(1)), (0,)),
    ],
    ids=str,
)
def test_ranks_along_the_replicated_axes_hold_the_same(
    four_ranks: DeviceMesh, placements: tuple[Any, ...], replicas: tuple[int, ...]
) -> None:
    weight = plans(on_mesh(four_ranks, *placements), world=FOUR)["weight"]

    assert (weight.replicas, weight.evidence) == (replicas, ReplicaEvidence.MESH)
    assert weight.placements == tuple(map(str, placements))
    assert weight.shape == (4, 4)


def test_a_partial_sum_is_compared_with_nobody(four_ranks: DeviceMesh) -> None:
    model = nn.Module()
    local = torch.ones(4)
    model.weight = nn.Parameter(DTensor.from_local(local, four_ranks, [Replicate(), Partial()]))

    assert plans(model, world=FOUR)["weight"].replicas == ()


def test_a_plain_parameter_beside_shards_belongs_to_their_mesh(four_ranks: DeviceMesh) -> None:
    model = on_mesh(four_ranks["tp"], Shard(0))

    scale = plans(model, world=FOUR)["scale"]

    assert (scale.replicas, scale.evidence) == ((0, 1), ReplicaEvidence.MODEL)


def test_a_mesh_is_reported_with_its_ranks_in_their_order(four_ranks: DeviceMesh) -> None:
    assert mesh_of(four_ranks) == Mesh(("dp", "tp"), (2, 2), FOUR)
    turned = DeviceMesh("cpu", [[3, 2], [1, 0]])
    assert mesh_of(turned) == Mesh(("dim0", "dim1"), (2, 2), (3, 2, 1, 0))


def test_the_part_of_this_rank_is_what_is_read(four_ranks: DeviceMesh) -> None:
    model = on_mesh(four_ranks, Replicate(), Shard(0))

    assert local_part(model.weight).shape == (2, 4)
    assert local_part(model.scale) is model.scale
