"""The line of the user's code that made what events name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import ObjectCreated, ObjectKind
from distdiag.probes.creations import Creations
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward

pytestmark = pytest.mark.usefixtures("fake_group")


class Block(nn.Module):
    """A module whose constructor hands on to another one of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Deeper(Block):
    """Two constructors of the user's lie between the call and torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = Block()


class Trainer:
    """Makes its model in a constructor of its own, which is no constructor of the model."""

    def __init__(self) -> None:
        self.model = Deeper()


def places(observed: Observed, kind: ObjectKind) -> dict[str, set[tuple[int, str] | None]]:
    """Return the line and function of what was made, by the names that events give it."""
    found: dict[str, set[tuple[int, str] | None]] = {}
    for each in observed.events(ObjectCreated):
        if each.object_kind is kind:
            place = each.place and (each.place.line, each.place.function)
            assert each.place is None or each.place.file == __file__
            found.setdefault(each.name, set()).add(place)
    return found


def line_of(function: Callable[..., object], text: str) -> int:
    """Return the number of the line of a function that begins with this text."""
    lines, first = inspect.getsourcelines(function)
    return next(first + at for at, line in enumerate(lines) if line.strip().startswith(text))


def test_a_model_is_made_where_its_constructor_is_called(observed: Observed) -> None:
    observed.install("steps")
    model = Deeper()
    backward(model)

    here = line_of(test_a_model_is_made_where_its_constructor_is_called, "model = ")
    assert places(observed, ObjectKind.MODEL)["Deeper"] == {
        (here, "test_a_model_is_made_where_its_constructor_is_called")
    }


def test_a_model_that_another_object_makes_is_made_there(observed: Observed) -> None:
    observed.install("steps")
    trainer = Trainer()
    backward(trainer.model)

    line = line_of(Trainer, "self.model")
    assert places(observed, ObjectKind.MODEL)["Deeper"] == {(line, "__init__")}


def test_a_copy_is_made_where_it_is_copied(observed: Observed) -> None:
    observed.install("steps")
    model = Block()
    twin = copy.deepcopy(model)
    backward(model)
    backward(twin)

    function = test_a_copy_is_made_where_it_is_copied
    found = {line for lines in places(observed, ObjectKind.MODEL).values() for line, _ in lines}
    assert {line_of(function, "model = "), line_of(function, "twin = ")} <= found


def test_an_optimizer_is_written_down_once_for_each_name(observed: Observed) -> None:
    observed.install("steps", "updates")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        optimizer.step()

    function = test_an_optimizer_is_written_down_once_for_each_name
    place = (line_of(function, "optimizer = "), function.__name__)
    found = places(observed, ObjectKind.OPTIMIZER)
    assert found and all(each == {place} for each in found.values())
    names = [each.name for each in observed.events(ObjectCreated)]
    kinds = [(each.object_kind, each.name) for each in observed.events(ObjectCreated)]
    assert len(kinds) == len(set(kinds)), names


def test_a_loader_and_its_sampler_are_made_at_their_own_lines(observed: Observed) -> None:
    observed.install("data")
    samples = TensorDataset(torch.arange(8.0))
    sampler = DistributedSampler(samples, num_replicas=1, rank=0)
    loader = DataLoader(samples, batch_size=2, sampler=sampler)
    list(loader)
    list(loader)

    function = test_a_loader_and_its_sampler_are_made_at_their_own_lines
    (loaders,) = places(observed, ObjectKind.LOADER).values()
    (samplers,) = places(observed, ObjectKind.SAMPLER).values()
    assert loaders == {(line_of(function, "loader = "), function.__name__)}
    assert samplers == {(line_of(function, "sampler = "), function.__name__)}


def test_a_mesh_is_made_where_it_is_asked_for(observed: Observed) -> None:
    observed.install("device-meshes")
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    function = test_a_mesh_is_made_where_it_is_asked_for
    place = (line_of(function, "mesh = "), function.__name__)
    names = {"dp=1 x tp=2", "dp=1", "tp=2"}
    assert mesh.size() == 2
    assert places(observed, ObjectKind.MESH) == {name: {place} for name in names}


def test_a_mesh_is_made_though_the_probe_fails(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed.install("device-meshes")
    monkeypatch.setattr(Creations, "note", lambda *_: 1 / 0)

    assert torch.distributed.init_device_mesh("cpu", (2,)).size() == 2
    (disabled,) = observed.events(ProbeDisabled)
    assert disabled.probe == "device-meshes"


def test_a_new_group_is_recorded_with_its_name(observed: Observed) -> None:
    observed.install("process-groups")
    group = torch.distributed.new_group([0, 1])

    before, after = observed.events(GroupCreated)
    assert (before.name, after.name) == ("", group.group_name)
