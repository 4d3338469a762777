from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import ModelPlan, ModelState, Moment, OptimizerState, ReplicaEvidence
from distdiag.probes.models.own_steps import EVERY
from distdiag.probes.models.tensor_plans import Held, Surroundings, plan_of
from distdiag.probes.models.wrappers import Tree
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward, ddp, fsdp2, means, network, reported, state, train

pytestmark = pytest.mark.usefixtures("fake_group")

START, BACKWARD, GRADIENT, STEP = Moment.START, Moment.BACKWARD, Moment.GRADIENT, Moment.STEP


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Models of earlier tests that only wait for the collector are not this test's."""
    gc.collect()


# The start


def test_a_model_of_ddp_is_looked_at_when_it_was_wrapped(observed: Observed) -> None:
    observed.install("steps")
    model = ddp(network())

    (plan,) = observed.events(ModelPlan)
    assert (plan.model, plan.moment, plan.total) == ("DDP Sequential", START, 7)
    assert [tensor.name for tensor in plan.tensors][:2] == ["0.weight", "0.bias"]
    found = means(state(observed, START))
    assert found[0] == pytest.approx(model.module[0].weight.mean().item(), rel=1e-4)
    assert found[-2:] == [1.0, 0.0]  # a variance, and the number of batches
    assert plan.site.location is not None
    assert plan.site.location.function == "ddp"


def test_a_model_begins_once_however_many_are_wrapped_after_it(observed: Observed) -> None:
    observed.install("steps")
    models = [ddp(network()) for _ in range(3)]

    assert len(models) == 3
    assert [event.model for event in observed.events(ModelState)] == [
        "DDP Sequential",
        "DDP Sequential#2",
        "DDP Sequential#3",
    ]


def test_a_model_of_fsdp2_is_looked_at_before_its_first_use(observed: Observed) -> None:
    observed.install("steps", "sharding-moments")
    model = nn.Sequential(nn.Linear(2, 3))
    fsdp2(model)
    assert not reported(observed)

    with torch.no_grad():
        model(torch.ones(1, 2))

    found = state(observed, START)
    assert found.model == "FSDP2 Sequential"
    assert [content.num_elements for content in found.contents if content] == [4, 2]


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_fsdp1_is_looked_at_before_its_first_use(observed: Observed) -> None:
    observed.install("steps", "sharding-moments")
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        pass  # initialises it too, and what is loaded here is not there yet
    assert not reported(observed)

    backward(model)

    assert reported(observed)[0] == (START, 0)
    assert means(state(observed, START))[-3:] == [0.0, 1.0, 0.0]  # no statistics of the data yet


def test_a_model_that_nothing_wraps_is_looked_at_before_the_first_backward_pass(
    observed: Observed,
) -> None:
    observed.install("steps")
    model = network()
    loss = model(torch.ones(2, 2)).sum()
    assert not reported(observed)

    loss.backward()

    assert reported(observed)[0] == (START, 0)
    assert state(observed, START).model == "Sequential"
    assert {tensor.evidence for tensor in observed.events(ModelPlan)[0].tensors} == {
        ReplicaEvidence.WORLD
    }


def test_a_frozen_model_beside_is_looked_at_too(observed: Observed) -> None:
    observed.install("steps")
    teacher = nn.Linear(2, 2).requires_grad_(False)

    train(ddp(network()))

    found = state(observed, START, "Linear")
    assert found.contents[0] is not None
    assert found.contents[0].mean == pytest.approx(teacher.weight.mean().item(), rel=1e-4)
    (plan,) = [event for event in observed.events(ModelPlan) if event.model == "Linear"]
    assert {tensor.evidence for tensor in plan.tensors} == {ReplicaEvidence.FROZEN}


def test_a_model_that_comes_later_is_looked_at_in_its_first_steps(observed: Observed) -> None:
    observed.install("steps")
    train(network(), 5)
    late = nn.Linear(2, 2)

    train(late, 5)

    steps = [s.step for s in observed.events(ModelState) if (s.model, s.moment) == ("Linear", STEP)]
    assert steps == [0, 1, 2, 4]  # its own, however many others have stepped


def test_without_a_process_group_there_is_nothing_to_compare(observed: Observed) -> None:
    dist.destroy_process_group()
    observed.install("steps")

    train(network())

    assert not reported(observed)
    assert not observed.events(ProbeDisabled)


def test_garbage_is_not_looked_at(observed: Observed) -> None:
    observed.install("steps")
    scratch = nn.Linear(2, 2)
    del scratch
    gc.collect()

    train(network())

    assert {event.model for event in observed.events(ModelState)} == {"Sequential"}


def test_a_copy_is_a_model_of_its_own(observed: Observed) -> None:
    observed.install("steps")
    model = network()
    average = copy.deepcopy(model).requires_grad_(False)

    train(ddp(model))

    assert means(state(observed, START, "Sequential")) == means(
        state(observed, START, "DDP Sequential")
    )
    assert average[0].weight.grad is None


def test_models_of_one_class_are_numbered_in_the_order_of_their_making(observed: Observed) -> None:
    observed.install("steps")
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        first.weight.fill_(1.0)
        second.weight.fill_(2.0)

    backward(second)

    assert means(state(observed, START, "Linear 1 of 2"))[0] == 1.0
    assert means(state(observed, START, "Linear 2 of 2"))[0] == 2.0


def test_only_models_that_nothing_wraps_are_numbered_among_each_other(observed: Observed) -> None:
    observed.install("steps")
    parts = [nn.Linear(2, 2), ddp(nn.Linear(2, 2)), nn.Linear(2, 2)]
    models = [nn.Sequential(part) for part in parts]

    backward(models[0])

    names = [event.model for event in observed.events(ModelState) if event.moment is START]
    assert {"DDP Sequential", "Sequential 1 of 2", "Sequential 2 of 2"} <= set(names)


# The steps


def test_a_step_is_seen_after_backward_and_before_the_optimizer(observed: Observed) -> None:
    observed.install("steps")
    train(ddp(network()))
    assert reported(observed) == [(START, 0), (BACKWARD, 0), (GRADIENT, 0), (STEP, 0)]


def test_the_first_three_steps_those_of_powers_of_two_and_every_hundredth(
    observed: Observed,
) -> None:
    observed.install("steps")

    train(network(), 2 * EVERY + 2)

    steps = [0, 1, 2, 4, 8, 16, 32, 64, 100, 128, 200]
    for moment in (BACKWARD, GRADIENT, STEP):
        assert [step for m, step in reported(observed) if m is moment] == steps
    assert [event.step for event in observed.events(OptimizerState)] == steps


def test_the_light_profile_looks_at_the_start_only(observed: Observed) -> None:
    observed.install("steps", profile="light")

    train(ddp(network()), 2)

    assert reported(observed) == [(START, 0)]
    assert not observed.events(OptimizerState)


def test_what_is_seen_before_a_step_comes_from_one_plan(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[object] = []

    def counted(tree: Tree, around: Surroundings) -> list[Held]:
        walks.append(tree)
        return plan_of(tree, around)

    monkeypatch.setattr("distdiag.probes.models.snapshot.plan_of", counted)
    observed.install("steps")

    train(network(), 1)

    assert [moment for moment, _ in reported(observed)] == [START, BACKWARD, GRADIENT, STEP]
    assert len(walks) == 3  # the start, the backward pass and the step


def test_every_backward_pass_of_a_step_may_be_the_last(observed: Observed) -> None:
    observed.install("steps")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    backward(model)
    backward(model)
    optimizer.step()

    assert [moment for moment, _ in reported(observed)] == [
        START,
        BACKWARD,
        BACKWARD,
        GRADIENT,
        STEP,
    ]
    assert observed.events(OptimizerState)[0].num_backwards == 2


def test_two_optimizers_of_one_step_find_the_models_as_one(observed: Observed) -> None:
    observed.install("steps")
    model = network()
    parts = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]

    backward(model)
    for optimizer in parts:
        optimizer.step()

    assert [moment for moment, _ in reported(observed)] == [START, BACKWARD, GRADIENT, STEP]
    assert [s.optimizer for s in observed.events(OptimizerState)] == [
        "SGD of Sequential",
        "SGD of Sequential#2",
    ]


def test_gradients_are_reported_as_the_step_finds_them(observed: Observed) -> None:
    observed.install("steps")
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model.register_buffer("scale", torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)
    found, weight = model.weight.grad.mean().item(), model.weight.mean().item()

    model.weight.grad /= 2
    optimizer.step()

    assert means(state(observed, BACKWARD)) == [pytest.approx(found, rel=1e-4), None, None]
    assert means(state(observed, GRADIENT)) == [pytest.approx(found / 2, rel=1e-4), None, None]
    assert means(state(observed, STEP))[0] == pytest.approx(weight, rel=1e-4)


def test_without_any_gradient_there_is_no_state_of_gradients(observed: Observed) -> None:
    observed.install("steps")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)

    optimizer.zero_grad()
    optimizer.step()

    assert [moment for moment, _ in reported(observed)] == [START, BACKWARD, STEP]
    assert observed.events(OptimizerState)[0].num_without_gradient == 4


def test_gradients_of_shards_are_reported_by_their_local_part(observed: Observed) -> None:
    observed.install("steps", "sharding-moments")
    model = nn.Sequential(nn.Linear(2, 4))
    fsdp2(model)

    train(model)

    assert [c.num_elements for c in state(observed, GRADIENT).contents if c] == [4, 2]
    assert state(observed, BACKWARD).contents == state(observed, GRADIENT).contents
