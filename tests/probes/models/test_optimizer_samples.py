from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import OptimizerState
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward, ddp, fsdp2, train

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Models of earlier tests that only wait for the collector are not this test's."""
    gc.collect()


class Acting(torch.optim.Optimizer):
    """An optimizer whose step is this function of its parameters."""

    def __init__(self, parameters: Any, act: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._act = act

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self._act(self.param_groups[0]["params"])


def copies(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of another precision, as an optimizer may keep them."""
    return [nn.Parameter(p.detach().double()) for p in model.parameters()]


def only(observed: Observed) -> OptimizerState:
    (found,) = observed.events(OptimizerState)
    return found


# What was replaced


def test_parameters_that_a_step_does_not_change_were_replaced(observed: Observed) -> None:
    observed.install("steps")
    model, stale = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    gc.collect()
    backward(model)

    stale.step()

    assert only(observed).replaced == ("weight", "bias")
    assert only(observed).num_foreign == 2


def test_copies_that_get_gradients_inside_the_step_replace_nothing(observed: Observed) -> None:
    observed.install("steps")
    model = nn.Linear(2, 2)

    def give_gradients(masters: list[torch.Tensor]) -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.double()  # it is too small to change the parameter

    optimizer = Acting(copies(model), give_gradients)
    backward(model)
    optimizer.step()

    assert (only(observed).replaced, only(observed).num_foreign) == ((), 2)


def test_copies_that_are_written_back_replace_nothing(observed: Observed) -> None:
    observed.install("steps")
    model = nn.Linear(2, 2)

    def write_back(masters: list[torch.Tensor]) -> None:
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master -= parameter.grad
            parameter.copy_(master)

    optimizer = Acting(copies(model), write_back)
    backward(model)
    optimizer.step()

    assert (only(observed).replaced, only(observed).num_foreign) == ((), 2)


# What no optimizer holds


@pytest.mark.parametrize("by_hand", [False, True])
def test_new_parameters_are_forgotten_unless_the_program_moves_them(
    observed: Observed, by_hand: bool
) -> None:
    observed.install("steps")
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.append(nn.Linear(2, 2))

    for _ in range(2):
        backward(model)
        optimizer.step()
        if by_hand:
            for parameter in model[1].parameters():
                parameter.data.sub_(0.1 * parameter.grad)

    first, second = observed.events(OptimizerState)
    assert not first.forgotten
    assert second.forgotten == (() if by_hand else ("1.weight", "1.bias"))


# A copy that is used instead of what the optimizer holds


def run_copy(observed: Observed, after: Callable[..., None], *, copied: nn.Module) -> Any:
    """Train a copy while the optimizer holds the first model; return what is said at each step."""
    first = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    for _ in range(3):
        backward(copied)
        optimizer.step()
        after(first, copied)
    return [(each.copied, each.copied_model) for each in observed.events(OptimizerState)]


def test_a_copy_that_has_the_gradients_and_never_changes_is_reported(observed: Observed) -> None:
    observed.install("steps")
    found = run_copy(observed, lambda *_: None, copied=copy.deepcopy(nn.Linear(2, 2)))
    assert found == [((), ""), *[(("weight", "bias"), "Linear 1 of 2")] * 2]


def by_hand(_: nn.Module, copied: nn.Module) -> None:
    for parameter in copied.parameters():
        parameter.data -= 0.1 * parameter.grad


def given_back(first: nn.Module, copied: nn.Module) -> None:
    for parameter, other in zip(first.parameters(), copied.parameters(), strict=True):
        parameter.grad = other.grad.clone()  # late by a step


@pytest.mark.parametrize("after", [by_hand, given_back])
def test_a_copy_that_is_trained_otherwise_is_not(
    observed: Observed, after: Callable[..., None]
) -> None:
    observed.install("steps")
    found = run_copy(observed, after, copied=nn.Linear(2, 2))
    assert found == [((), "")] * 3


def test_another_model_that_has_gradients_is_no_copy(observed: Observed) -> None:
    observed.install("steps")
    found = run_copy(observed, lambda *_: None, copied=nn.Sequential(nn.Linear(2, 2)))
    assert found == [((), "")] * 3


# When it is written


def test_an_optimizer_is_written_down_after_its_step(observed: Observed) -> None:
    observed.install("steps")
    model, during = nn.Linear(2, 2), []
    optimizer = Acting(model.parameters(), lambda _: during.extend(observed.events(OptimizerState)))
    backward(model)

    optimizer.step()

    assert not during
    assert only(observed).site.location is not None
    assert only(observed).site.location.file == __file__


def test_a_step_that_raises_is_not_written_down(observed: Observed) -> None:
    observed.install("steps")
    model, failures = nn.Linear(2, 2), ["out of memory"]

    def act(_: list[torch.Tensor]) -> None:
        if failures:
            raise RuntimeError(failures.pop())

    optimizer = Acting(model.parameters(), act)
    backward(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert not observed.events(OptimizerState)

    optimizer.step()

    assert only(observed).num_steps == 1
    assert not observed.events(ProbeDisabled)


# Names


def test_optimizers_are_named_after_the_models_that_they_train(observed: Observed) -> None:
    observed.install("steps")
    plain, wrapped = nn.Linear(2, 2), ddp(nn.Linear(2, 2))
    made = [train(plain), train(wrapped), train(plain)]

    assert len(made) == 3
    assert [event.optimizer for event in observed.events(OptimizerState)] == [
        "SGD of Linear",
        "SGD of DDP Linear",
        "SGD of Linear#2",
    ]


def test_an_optimizer_counts_its_own_steps(observed: Observed) -> None:
    observed.install("steps")
    made = [train(ddp(nn.Linear(2, 2)), 2), train(nn.Linear(2, 2), 2)]

    assert len(made) == 2
    assert [event.step for event in observed.events(OptimizerState)] == [0, 1, 0, 1]


def test_the_ranks_that_keep_its_model_together_are_reported(observed: Observed) -> None:
    observed.install("steps")
    train(fsdp2(nn.Sequential(nn.Linear(2, 4))))
    assert (only(observed).optimizer, only(observed).members) == ("SGD of FSDP2 Sequential", (0, 1))


# Gradients that a step makes itself


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_that_a_closure_makes_are_seen(observed: Observed, by_name: bool) -> None:
    observed.install("steps")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []

    def closure(number: int) -> float:
        optimizer.zero_grad()
        backward(model)
        results.append(number)
        return 7.0

    backward(model)
    optimizer.zero_grad()
    given = functools.partial(closure, 3)  # has no name
    result = optimizer.step(closure=given) if by_name else optimizer.step(given)

    assert (result, results) == (7.0, [3])
    assert only(observed).num_without_gradient == 0
    assert not observed.events(ProbeDisabled)
