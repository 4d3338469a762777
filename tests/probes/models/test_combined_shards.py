"""Collectives that are given the shards of one parameter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from distdiag.events.models import ShardsCombined
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


def model(mesh: DeviceMesh, placement: Placement) -> nn.Module:
    net = nn.Linear(4, 4, bias=False)
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [placement]))
    net.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [placement])
    return net


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def combined(
    observed: Observed, placement: Placement, *, is_gradient: bool
) -> list[ShardsCombined]:
    observed.install("collectives", "steps", "combined-shards")
    net = model(init_device_mesh("cpu", (2,)), placement)
    torch.optim.SGD(net.parameters(), lr=0.1)
    if is_gradient:
        dist.all_reduce(local(net.weight.grad))
    else:
        dist.broadcast(local(net.weight), 0)
    return observed.events(ShardsCombined)


@pytest.mark.parametrize("is_gradient", [True, False])
def test_shards_that_are_combined_are_told_once(observed: Observed, is_gradient: bool) -> None:
    (found,) = combined(observed, Shard(0), is_gradient=is_gradient)
    assert (found.parameter, found.is_gradient) == ("weight", is_gradient)
    assert found.ranks == (0, 1)
    assert found.reduce_op == ("SUM" if is_gradient else "")
    assert found.site.location is not None
    assert found.site.location.file == __file__


def test_copies_may_be_combined(observed: Observed) -> None:
    assert not combined(observed, Replicate(), is_gradient=True)


def test_memory_that_was_a_shard_may_be_used_for_something_else(observed: Observed) -> None:
    observed.install("collectives", "steps", "combined-shards")
    net = model(init_device_mesh("cpu", (2,)), Shard(0))
    dist.all_reduce(torch.ones(1))  # what there is now is known from here on
    memory = local(net.weight.grad)
    net.weight.grad = None
    dist.all_reduce(memory)
    assert not observed.events(ShardsCombined)


def test_another_tensor_may_be(observed: Observed) -> None:
    observed.install("collectives", "steps", "combined-shards")
    net = model(init_device_mesh("cpu", (2,)), Shard(0))
    dist.all_reduce(local(net.weight.grad).clone())
    assert not observed.events(ShardsCombined)
