"""Which functions of libraries are verified where a program names none, and with what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdiag.config.subjects import SequenceConfig
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.sequences import SequenceUnverified, TokenTrace
from distdiag.frameworks import sequence_functions
from distdiag.frameworks.sequence_functions import LIBRARIES
from distdiag.probes.sequence.library_functions import (
    Attribute,
    Call,
    Exchanging,
    GroupOf,
    Ready,
    Slot,
    Splitting,
    Unavailable,
    config_of,
    library_sequences,
)
from tests.probes.conftest import Observed

TAKING = Splitting(
    Call("splitting:take", (Slot.TENSOR, Slot.RANK), (("size", Slot.SIZE),)),
    None,
    GroupOf(("splitting:GROUP",)),
    dim=1,
    has_backward=False,
)
SWAPPING = Exchanging(
    Call("splitting:swap", (Slot.GROUP, Slot.TENSOR, Attribute("scatter"))),
    Call("splitting:swap", (Slot.GROUP, Slot.TENSOR, 1)),
    GroupOf(attribute="spg"),
    dim=1,
    head_dim=2,
    layer="splitting:Layer",
    scattered="scatter",
)


class Layer(nn.Module):
    def __init__(self, group: object, scatter: int) -> None:
        super().__init__()
        self.spg, self.scatter = group, scatter


def take(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, 1)[rank]


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A library of which this process, rank 0 of two, has imported the only module."""
    module = ModuleType("splitting")
    module.__dict__.update(take=take, swap=lambda *given: given, Layer=Layer)
    monkeypatch.setitem(sys.modules, "splitting", module)
    monkeypatch.setattr(sequence_functions, "LIBRARIES", (TAKING, SWAPPING))
    monkeypatch.setattr("distdiag.probes.sequence.verify.MARKED", {})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield module
    dist.destroy_process_group()


def found(*models: nn.Module) -> list[Ready | Unavailable]:
    return list(library_sequences((TAKING, SWAPPING), models, None))


def test_functions_are_called_with_what_the_table_says(splitting: ModuleType) -> None:
    splitting.GROUP = dist.group.WORLD
    ready, unavailable = found()
    assert isinstance(ready, Ready)
    assert ready.members == (0, 1)
    assert ready.functions.gather is None
    assert ready.functions.split(torch.arange(8).reshape(1, 8)).tolist() == [[0, 1, 2, 3]]
    assert unavailable == Unavailable(
        SWAPPING.name, "no model has such a layer with a group", is_set_up=False
    )


@pytest.mark.parametrize(
    ("group", "reason"), [(None, "its group is not set up"), (..., "its group has one rank")]
)
def test_groups_that_are_not_there_or_of_one_rank(splitting, group, reason) -> None:
    splitting.GROUP = None if group is None else dist.new_group([0])
    assert found()[0] == Unavailable(TAKING.name, reason, is_set_up=False)


def test_a_version_that_lacks_a_function_is_reported(splitting: ModuleType) -> None:
    splitting.GROUP = dist.group.WORLD
    del splitting.take
    (first, _) = found()
    assert first == Unavailable(TAKING.name, "this version has no splitting:take", is_set_up=True)


def test_a_library_that_is_not_imported_is_left_alone(splitting, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "splitting")
    assert found() == []


def test_layers_are_taken_once_for_each_group_and_index(splitting: ModuleType) -> None:
    splitting.GROUP = None
    layers = [Layer(dist.group.WORLD, scatter) for scatter in (2, 2, 1)]
    _, usual, other = found(nn.ModuleList(layers))
    assert (usual.is_form_sure, other.is_form_sure) == (True, False)
    config = config_of(SequenceConfig(causal=True, documents=(8, 8)), usual)
    assert (config.length, config.heads, config.causal, config.documents) == (16, 2, False, ())
    assert config.reduction == "mean"


def trained(observed: Observed, config: SequenceConfig) -> None:
    observed.install("steps", "verify-sequence", verify_sequence=True, sequence=config)
    nn.Linear(2, 2)(torch.rand(3, 2)).sum().backward()


def test_they_are_verified_before_the_first_backward_pass(splitting, observed) -> None:
    splitting.GROUP = dist.group.WORLD
    trained(observed, SequenceConfig())
    (trace,) = observed.events(TokenTrace)
    assert trace.name == "splitting:take"
    assert trace.parts == (*range(8), *range(16, 24))
    assert trace.gathered_shape == trace.scales == ()
    assert not observed.events(SequenceUnverified)


def test_where_nothing_can_be_verified_the_reasons_are_reported(splitting, observed) -> None:
    splitting.GROUP = None
    trained(observed, SequenceConfig())
    reported = {event.name: event.reason for event in observed.events(SequenceUnverified)}
    assert reported["splitting:take"] == "its group is not set up"
    (disabled,) = observed.events(ProbeDisabled)
    assert "no function is named" in disabled.reason


def test_what_the_user_names_is_all_that_is_verified(splitting, observed) -> None:
    splitting.GROUP = dist.group.WORLD
    name = f"{__name__}:same"
    trained(observed, SequenceConfig(split=(name,), gather=(name,)))
    (trace,) = observed.events(TokenTrace)
    assert trace.name == f"{name}, {name}"


def same(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("entry", LIBRARIES, ids=lambda entry: entry.name)
def test_what_the_table_names_is_there_in_installed_libraries(entry) -> None:
    calls = [entry.split, entry.gather] if isinstance(entry, Splitting) else entry[:2]
    for call in filter(None, calls):
        module, _, path = call.function.partition(":")
        found = pytest.importorskip(module, exc_type=ImportError)
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found)
