from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distdiag.probes.models.snapshot import SharedTensors

pytestmark = pytest.mark.usefixtures("fake_group")

PAIR = (0, 1)
NOW = (1, 0)
"""How many models and backward passes there were."""


def shared(model: nn.Module, *tensors: object) -> dict[int, tuple[int, ...]]:
    """Who shares which parameters of a model after collectives with these tensors."""
    found = SharedTensors(lambda: [model])
    for tensor in tensors:
        found.note(tensor, dist.group.WORLD, NOW)
    return found.sent() | found.reduced(NOW[1])


def model_with_gradients() -> nn.Linear:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model


def test_parameters_and_gradients_are_recognised_by_their_memory() -> None:
    model = model_with_gradients()
    found = shared(model, model.weight.grad, model.bias.data)
    assert found == {id(model.weight): PAIR, id(model.bias): PAIR}


def test_what_was_sent_and_what_was_reduced_are_reported_apart() -> None:
    model = model_with_gradients()
    found = SharedTensors(lambda: [model])

    found.note([model.weight.grad, model.bias.data], dist.group.WORLD, NOW)

    assert found.reduced(NOW[1]) == {id(model.weight): PAIR}
    assert found.sent() == {id(model.bias): PAIR}


def test_a_gradient_was_reduced_for_one_step_only() -> None:
    model = model_with_gradients()
    found = SharedTensors(lambda: [model])
    found.note([model.weight.grad, model.bias.data], dist.group.WORLD, (1, 1))

    assert not found.reduced(2)
    found.note(model.bias.grad, dist.group.WORLD, (1, 2))

    assert found.reduced(2) == {id(model.bias): PAIR}
    assert found.sent() == {id(model.bias): PAIR}


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
    model = model_with_gradients()
    found = SharedTensors(lambda: [model])
    found.note(model.bias.grad, dist.new_group([0]), NOW)
    assert found.reduced(0) == {id(model.bias): (0,)}


def test_parameters_are_looked_up_anew_when_something_has_changed() -> None:
    model = nn.Linear(2, 2)
    found = SharedTensors(lambda: [model])
    found.note(torch.ones(1), dist.group.WORLD, NOW)
    model(torch.ones(1, 2)).sum().backward()

    found.note(model.weight.grad, dist.group.WORLD, NOW)
    assert not found.reduced(0)
    found.note(model.weight.grad, dist.group.WORLD, (1, 1))
    assert found.reduced(1) == {id(model.weight): PAIR}


def test_a_part_of_a_parameter_is_not_the_parameter() -> None:
    model = model_with_gradients()
    assert not shared(model, model.weight.grad[:1])


def test_parameters_that_are_gone_share_nothing() -> None:
    models = [model_with_gradients()]
    found = SharedTensors(lambda: models)
    found.note([models[0].weight.grad, models[0].bias.data], dist.group.WORLD, NOW)
    assert found.reduced(0)
    assert found.sent()

    models.clear()
    gc.collect()

    assert not found.reduced(0)
    assert not found.sent()
