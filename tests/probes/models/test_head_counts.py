"""Numbers of attention heads before and after a model was sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distdiag.probes.models.attention_heads import HeadCounts
from distdiag.probes.models.wrappers import walk


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(8, 24)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(8, 8)


def divided(counts: HeadCounts, model: nn.Module) -> dict[int, int]:
    return counts.divided(list(walk(model)))


def split(linear: nn.Linear, placement: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(linear.weight, mesh, [placement], src_data_rank=None)
    linear.weight = nn.Parameter(whole)


@pytest.fixture
def layer(fake_group: None) -> Layer:
    return Layer()


def test_a_number_that_the_mesh_divides_while_the_weights_are_whole_is_reported(
    layer: Layer,
) -> None:
    counts = HeadCounts()
    assert divided(counts, layer) == {}

    split(layer.up, Shard(0))
    layer.attention.num_heads //= 2

    parts = {id(layer.attention), id(layer.attention.qkv)}
    assert divided(counts, layer) == dict.fromkeys(parts, 2)


def test_the_configuration_tells_the_number_too(layer: Layer) -> None:
    layer.config = SimpleNamespace(num_attention_heads=4)  # type: ignore[assignment]
    split(layer.up, Shard(0))
    layer.attention.num_heads = 2

    assert set(divided(HeadCounts(), layer).values()) == {2}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_heads_of_a_module_that_is_on_the_mesh_itself_may_be_divided(
    layer: Layer, placement: Any
) -> None:
    counts = HeadCounts()
    divided(counts, layer)
    split(layer.attention.qkv, placement)
    layer.attention.num_heads //= 2

    assert divided(counts, layer) == {}


@pytest.mark.parametrize("heads", [4, 1, 3])
def test_other_numbers_are_nobody_s_business(layer: Layer, heads: int) -> None:
    counts = HeadCounts()
    divided(counts, layer)
    split(layer.up, Shard(0))
    layer.attention.num_heads = heads

    assert divided(counts, layer) == {}
