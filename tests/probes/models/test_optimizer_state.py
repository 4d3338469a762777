from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distdiag.events.models import OptimizerState
from distdiag.probes.models.optimizer_state import StepCounts, fields_of, has_only_zeros, owners_of
from tests.probes.conftest import Observed


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def sgd(model: nn.Module, **values: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=values.pop("lr", 0.1), **values)


def fields(optimizer: torch.optim.Optimizer, *roots: nn.Module) -> dict[str, Any]:
    """The fields of one optimizer among these models, when it is the only one."""
    return fields_of(optimizer, [optimizer], roots)


def test_a_parameter_may_have_several_owners() -> None:
    model = nn.Linear(2, 2)
    first, second = sgd(model), torch.optim.AdamW([model.weight])

    owners = owners_of([first, second], {id(first): "SGD of Linear"})

    assert owners == {
        id(model.weight): ("SGD of Linear", "AdamW"),
        id(model.bias): ("SGD of Linear",),
    }


def test_a_healthy_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    backward(model)

    found = fields(optimizer, model)

    assert (found["num_parameters"], found["num_gradients"]) == (2, 2)
    assert (found["num_without_gradient"], found["num_foreign"]) == (0, 0)
    assert (found["replaced"], found["learning_rates"]) == ((), (0.1,))


def test_gradients_of_other_models_are_counted_too() -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    backward(critic)

    found = fields(sgd(generator), generator, critic)

    assert (found["num_without_gradient"], found["num_gradients"]) == (2, 1)


def test_parameters_outside_of_models_are_foreign_and_replaced_nothing() -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    backward(model)

    found = fields(optimizer, model)

    assert (found["num_foreign"], found["replaced"]) == (1, ())


def test_a_foreign_parameter_that_learns_replaced_nothing() -> None:
    model, prompt = nn.Linear(2, 2), nn.Parameter(torch.ones(1, 2))
    model(prompt).sum().backward()

    found = fields(torch.optim.SGD([prompt], lr=0.1), model)

    assert (found["num_foreign"], found["replaced"]) == (1, ())


def test_an_optimizer_made_before_sharding_holds_what_was_replaced(fake_group: None) -> None:
    model = nn.Sequential(nn.Linear(2, 4))
    early = sgd(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    backward(model)

    found = fields(early, model)

    assert (found["num_foreign"], found["num_parameters"]) == (2, 2)
    assert found["replaced"] == ("0.weight", "0.bias")
    assert found["num_without_gradient"] == 2


def test_an_optimizer_made_after_sharding_is_healthy(fake_group: None) -> None:
    model = nn.Sequential(nn.Linear(2, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    optimizer = sgd(model)
    backward(model)

    found = fields(optimizer, model)
    model(torch.ones(1, 2))  # the parameters are gathered now
    gathered = fields(optimizer, model)

    for each in (found, gathered):
        assert (each["num_foreign"], each["replaced"], each["num_gradients"]) == (0, (), 2)


def test_parameters_that_have_an_optimizer_were_not_replaced() -> None:
    old, model = nn.Linear(2, 2), nn.Linear(2, 2)
    stale, used = sgd(old), sgd(model)
    backward(model)

    found = fields_of(stale, [stale, used], [model])

    assert (found["num_foreign"], found["replaced"]) == (2, ())


def test_the_names_are_those_that_the_user_knows() -> None:
    old, model = nn.Linear(2, 2), nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})
    backward(model["_orig_mod"])
    assert fields(sgd(old), model)["replaced"] == ("weight", "bias")


@pytest.mark.parametrize(
    ("rate", "reported"), [(0.5, 0.5), (torch.tensor(0.25), 0.25), (1, 1.0)], ids=str
)
def test_rates_may_be_numbers_or_tensors(rate: Any, reported: float) -> None:
    model = nn.Linear(2, 2)
    assert fields(sgd(model, lr=rate), model)["learning_rates"] == (reported,)


def test_a_rate_that_is_not_on_the_host_is_not_read() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    optimizer.param_groups[0]["lr"] = torch.ones((), device="meta")

    (rate,) = fields(optimizer, model)["learning_rates"]

    assert math.isnan(rate)


def test_each_group_of_parameters_has_its_rate() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert fields(optimizer, model)["learning_rates"] == (0.1, 0.01)


def test_counters_are_the_least_and_the_greatest() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert fields(optimizer, model)["least_count"] == -1

    backward(model)
    optimizer.step()
    model.bias.grad = None
    optimizer.step()

    found = fields(optimizer, model)
    assert (found["least_count"], found["greatest_count"]) == (1, 2)


def test_counters_may_be_plain_numbers_or_out_of_reach() -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    optimizer.state[model.weight]["step"] = 7
    optimizer.state[model.bias]["step"] = torch.ones((), device="meta")

    found = fields(optimizer, model)

    assert (found["least_count"], found["greatest_count"]) == (-1, 7)


def test_state_of_parameters_that_are_gone_is_stale() -> None:
    model, old = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[old.weight]["step"] = torch.tensor(4.0)
    optimizer.state[model.bias]["step"] = torch.tensor(4.0)

    found = fields(optimizer, model)

    assert (found["num_stale_states"], found["stateless"]) == (1, ("weight",))


def test_state_of_parameters_that_a_model_still_has_is_not_stale() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters())
    for parameter in model[0].parameters():
        optimizer.state[parameter]["step"] = torch.tensor(4.0)
    optimizer.param_groups[0]["params"] = list(model[1].parameters())

    assert fields(optimizer, model)["num_stale_states"] == 0


def test_looking_makes_no_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    fields(optimizer, model)

    assert not optimizer.state


@pytest.mark.parametrize(("factor", "is_zero"), [(0.0, True), (1.0, False)])
def test_gradients_that_are_all_zero_are_known(factor: float, is_zero: bool) -> None:
    model = nn.Linear(2, 2)
    (model(torch.ones(1, 2)).sum() * factor).backward()
    assert has_only_zeros(sgd(model)) is is_zero


def test_no_gradients_are_not_zeros() -> None:
    assert not has_only_zeros(sgd(nn.Linear(2, 2)))


def test_backward_passes_are_counted_from_one_step_to_the_next() -> None:
    first, second = sgd(nn.Linear(2, 2)), sgd(nn.Linear(2, 2))
    counts = StepCounts()

    counts.count(first, num_backwards=2)
    counts.count(second, num_backwards=2)
    assert counts.fields(second)["num_backwards"] == 2

    counts.count(first, num_backwards=3)
    assert (counts.of(first), counts.of(second)) == (1, 0)
    found = counts.fields(first)
    assert [found[each] for each in ("num_backwards", "num_steps", "num_zero_steps")] == [1, 1, 0]


def rates_of(*rates: float | torch.Tensor) -> dict[str, Any]:
    """What is known of an optimizer that steps once with each of these rates."""
    optimizer, counts = sgd(nn.Linear(2, 2)), StepCounts()
    for number, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        counts.count(optimizer, num_backwards=number)
    return counts.fields(optimizer)


def test_it_is_known_since_when_a_rate_is_another() -> None:
    found = rates_of(0.1, 0.1, 0.05, 0.05)
    assert found["rate_changes"] == ((0, (0.1,)), (2, (0.05,)))
    assert found["rate_history"] == rates_of(0.1, 0.1, 0.05)["rate_history"]


def test_rates_that_are_the_same_again_have_another_history() -> None:
    once, later = rates_of(0.1, 0.05, 0.05), rates_of(0.1, 0.1, 0.05)
    assert once["rate_history"] != later["rate_history"]


def test_a_rate_in_a_tensor_is_not_read() -> None:
    assert rates_of(torch.tensor(0.1), torch.tensor(0.2))["rate_changes"] == ((0, (-1.0,)),)


def test_a_dummy_step_is_counted_as_one_with_zeros(observed: Observed, fake_group: None) -> None:
    observed.install("steps")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    backward(model)
    optimizer.step()

    states = observed.events(OptimizerState)
    assert [(s.num_steps, s.num_zero_steps, s.least_count) for s in states] == [
        (0, 0, -1),
        (1, 1, 1),
    ]


def test_the_step_by_which_torch_makes_a_state_is_not_the_programs(
    observed: Observed, fake_group: None
) -> None:
    observed.install("steps")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    get_optimizer_state_dict(model, optimizer)

    backward(model)
    optimizer.step()

    states = observed.events(OptimizerState)
    assert [(s.num_steps, s.num_zero_steps, s.least_count) for s in states] == [
        (0, 0, -1),
        (1, 0, 1),
    ]
