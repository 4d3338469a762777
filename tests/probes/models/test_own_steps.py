from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.models import ModelPlan, Moment, ReplicaEvidence
from distdiag.probes.models.own_steps import EVERY, FIRST_STEPS, OwnSteps
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward, ddp, train


def steps_of(*roots: nn.Module) -> OwnSteps:
    steps = OwnSteps(lambda: roots, lambda: 0)
    for root in roots:
        steps.start(root)
    return steps


def due(steps: OwnSteps, root: nn.Module, num_steps: int) -> list[int]:
    """Take so many steps; return those at which to look."""
    found = []
    for _ in range(num_steps):
        if steps.is_due(root):
            found.append(steps.of(root))
        steps.advance(root)
    return found


def step_after(steps: OwnSteps, model: nn.Module, num_backwards: int = 1) -> None:
    steps.after_backward([model])
    steps.begins(model, num_backwards)


# Which steps


def test_each_model_counts_its_own_steps() -> None:
    critic, generator = nn.Linear(2, 2), nn.Linear(2, 2)
    steps = steps_of(critic, generator)

    assert due(steps, critic, 6) == [0, 1, 2, 4]
    assert due(steps, generator, 2) == [0, 1]

    assert (steps.of(critic), steps.of(generator)) == (6, 2)
    assert not steps.is_due(critic)
    assert steps.is_due(generator)


def test_every_hundredth_step_is_due_and_before_it_those_of_powers_of_two() -> None:
    model = nn.Linear(2, 2)
    found = due(steps_of(model), model, 2 * EVERY + 2)
    assert found == [*range(FIRST_STEPS), 4, 8, 16, 32, 64, EVERY, 128, 2 * EVERY]


def test_a_model_that_starts_again_is_fresh() -> None:
    model = nn.Linear(2, 2)
    steps = steps_of(model)
    due(steps, model, 5)

    steps.start(model)

    assert due(steps, model, 5) == [5, 6, 7, 8]


def test_two_optimizers_after_one_backward_pass_take_one_step() -> None:
    model = nn.Linear(2, 2)
    steps = steps_of(model)
    assert [steps.begins(model, number) for number in (1, 1, 2)] == [True, False, True]


# Which gradients


@pytest.fixture
def wrapped(lone_group: None) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


def test_a_model_of_ddp_is_not_local(wrapped: DistributedDataParallel) -> None:
    steps = steps_of(wrapped)
    backward(wrapped)
    step_after(steps, wrapped)
    assert not steps.is_local(wrapped)
    assert steps.is_due(wrapped)


def test_a_step_after_no_sync_is_local_for_good(wrapped: DistributedDataParallel) -> None:
    steps = steps_of(wrapped)
    with wrapped.no_sync():
        backward(wrapped)
        step_after(steps, wrapped)
    assert steps.is_local(wrapped)

    backward(wrapped)
    step_after(steps, wrapped, 2)

    assert steps.is_local(wrapped)  # its parameters differ by now


def test_accumulation_without_sync_before_the_last_pass_is_not_local(
    wrapped: DistributedDataParallel,
) -> None:
    steps = steps_of(wrapped)
    with wrapped.no_sync():
        backward(wrapped)
        steps.after_backward([wrapped])
    backward(wrapped)
    step_after(steps, wrapped, 2)
    assert not steps.is_local(wrapped)


def test_who_reduces_in_his_own_way_is_local(lone_group: None) -> None:
    model = ddp(nn.Linear(2, 2))
    steps = steps_of(model)
    backward(model)
    step_after(steps, model)
    assert steps.is_local(model)


def test_after_join_no_step_is_due(wrapped: DistributedDataParallel) -> None:
    steps = steps_of(wrapped, nn.Linear(2, 2))
    assert steps.is_due(wrapped)

    with Join([wrapped]):
        backward(wrapped)
        step_after(steps, wrapped)

    assert not steps.is_due(wrapped)
    assert due(steps, wrapped, EVERY + 1) == []


def test_the_plan_of_a_model_tells_that_it_is_local(observed: Observed, lone_group: None) -> None:
    observed.install("steps")
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = train(wrapped)
    assert {each.evidence for each in observed.events(ModelPlan)[-1].tensors} == {
        ReplicaEvidence.WRAPPER
    }

    with wrapped.no_sync():
        backward(wrapped)
        optimizer.step()

    last = observed.events(ModelPlan)[-1]
    assert (last.moment, last.step) == (Moment.GRADIENT, 1)
    assert {each.evidence for each in last.tensors} == {ReplicaEvidence.UNSYNCED}


# Which models


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def test_the_models_of_an_optimizer_are_those_whose_parameters_it_holds() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    steps = steps_of(first, second, third)
    assert steps.roots_of(sgd(first, third)) == [first, third]


def test_models_are_looked_up_anew_when_there_are_others() -> None:
    now, roots = [0], []
    steps = OwnSteps(lambda: roots, lambda: now[0])
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    assert steps.roots_of(optimizer) == []

    roots.append(model)
    assert steps.roots_of(optimizer) == []
    now[0] += 1
    assert steps.roots_of(optimizer) == [model]


def test_parameters_that_an_optimizer_gets_later_count() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    roots: Sequence[nn.Module] = (first, second)
    steps, optimizer = steps_of(*roots), sgd(first)
    assert steps.roots_of(optimizer) == [first]

    optimizer.add_param_group({"params": list(second.parameters())})

    assert steps.roots_of(optimizer) == [first, second]
