from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distdiag.probes.shared_tensors import SharedTensors

pytestmark = pytest.mark.usefixtures("fake_group")

PAIR = (0, 1)


def shared(model: nn.Module, *tensors: object) -> dict[int, tuple[int, ...]]:
    """Who shares which parameters of a model after collectives with these tensors."""
    found = SharedTensors(lambda: [model])
    for tensor in tensors:
        found.note(tensor, dist.group.WORLD, 0)
    return found.ranks


def model_with_gradients() -> nn.Linear:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model


def test_parameters_and_gradients_are_recognised_by_their_memory() -> None:
    model = model_with_gradients()
    found = shared(model, model.weight.grad, model.bias.data)
    assert found == {id(model.weight): PAIR, id(model.bias): PAIR}


def test_other_shapes_of_the_same_memory_are_recognised() -> None:
    model = model_with_gradients()
    assert shared(model, model.weight.data.view(-1)) == {id(model.weight): PAIR}


def test_a_list_of_tensors_is_looked_through() -> None:
    model = model_with_gradients()
    tensors = [model.bias.grad, torch.ones(3), model.weight.grad]
    assert shared(model, tensors).keys() == {id(model.weight), id(model.bias)}


@pytest.mark.parametrize("other", [None, 3, torch.ones(2), torch.empty(0), [], "loss"], ids=repr)
def test_other_things_share_nothing(other: object) -> None:
    assert not shared(model_with_gradients(), other)


def test_the_ranks_are_those_of_the_group() -> None:
    model, found = model_with_gradients(), SharedTensors(list)
    found = SharedTensors(lambda: [model])
    found.note(model.bias.grad, dist.new_group([0]), 0)
    assert found.ranks == {id(model.bias): (0,)}


def test_parameters_are_looked_up_anew_when_something_has_changed() -> None:
    model = nn.Linear(2, 2)
    found = SharedTensors(lambda: [model])
    found.note(torch.ones(1), dist.group.WORLD, 0)
    model(torch.ones(1, 2)).sum().backward()

    found.note(model.weight.grad, dist.group.WORLD, 0)
    assert not found.ranks
    found.note(model.weight.grad, dist.group.WORLD, 1)
    assert found.ranks == {id(model.weight): PAIR}


def test_a_part_of_a_parameter_is_not_the_parameter() -> None:
    model = model_with_gradients()
    assert not shared(model, model.weight.grad[:1])


def test_parameters_that_are_gone_share_nothing() -> None:
    models = [model_with_gradients()]
    found = SharedTensors(lambda: models)
    found.note(models[0].weight.grad, dist.group.WORLD, 0)

    models.clear()
    gc.collect()

    assert not found.ranks
