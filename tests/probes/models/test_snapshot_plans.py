from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distdiag.events.models import ModelPlan, ModelState, Moment, ReplicaEvidence
from distdiag.probes.models.snapshot import CHUNK
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward, ddp, fsdp2, network, train

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Models of earlier tests that only wait for the collector are not this test's."""
    gc.collect()


def test_a_plan_is_reported_again_only_when_it_has_changed(observed: Observed) -> None:
    observed.install("steps")
    model = network()
    optimizer = train(model, 2)
    assert [plan.moment for plan in observed.events(ModelPlan)] == [Moment.START]

    model[0].requires_grad_(False)
    backward(model)

    again = observed.events(ModelPlan)[-1]
    assert (again.moment, again.step) == (Moment.BACKWARD, 2)
    assert not again.tensors[0].requires_grad
    assert again.tensors[2].requires_grad
    assert again.tensors[2].owners == (f"{type(optimizer).__name__} of Sequential",)


def test_optimizers_that_came_after_wrapping_make_a_new_plan(observed: Observed) -> None:
    observed.install("steps")

    train(ddp(network()))

    tensors = [plan.tensors[0] for plan in observed.events(ModelPlan)]
    assert [each.owners for each in tensors[:2]] == [(), ("SGD of DDP Sequential",)]


def test_large_models_are_reported_in_parts(observed: Observed) -> None:
    observed.install("steps")
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(CHUNK)])

    backward(model)

    plans, states = observed.events(ModelPlan), observed.events(ModelState)
    assert [(plan.first, len(plan.tensors)) for plan in plans] == [(0, CHUNK), (CHUNK, CHUNK)]
    assert [(s.first, len(s.contents)) for s in states[:2]] == [(0, CHUNK), (CHUNK, CHUNK)]
    assert {event.total for event in [*plans, *states]} == {2 * CHUNK}


def test_a_parameter_that_came_after_sharding_is_late(observed: Observed) -> None:
    observed.install("steps", "sharding-moments")
    model = nn.Sequential(nn.Linear(2, 4))
    fsdp2(model)
    model[0].lora = nn.Parameter(torch.ones(2))

    backward(model)

    tensors = observed.events(ModelPlan)[0].tensors
    assert [tensor.name for tensor in tensors if tensor.is_late] == ["0.lora"]


def test_a_gradient_that_the_program_reduces_itself_is_shared(observed: Observed) -> None:
    observed.install("collectives", "steps")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    backward(model)

    dist.all_reduce(model.weight.grad)
    optimizer.step()

    weight, bias = observed.events(ModelPlan)[-1].tensors
    assert (weight.evidence, weight.replicas) == (ReplicaEvidence.REDUCED, (0, 1))
    assert bias.evidence is ReplicaEvidence.WORLD


def test_a_parameter_that_the_program_broadcasts_is_shared_from_the_start(
    observed: Observed,
) -> None:
    observed.install("collectives", "steps")
    model = nn.Linear(2, 2)
    dist.broadcast(model.weight.data, 0)

    backward(model)

    weight, bias = observed.events(ModelPlan)[0].tensors
    assert (weight.evidence, weight.replicas) == (ReplicaEvidence.SENT, (0, 1))
    assert bias.evidence is ReplicaEvidence.WORLD


def test_other_tensors_that_are_sent_round_share_nothing(observed: Observed) -> None:
    observed.install("collectives", "steps")
    model = nn.Linear(2, 2)
    dist.all_reduce(model.weight.detach().clone())
    dist.all_gather([torch.ones(2, 2), torch.ones(2, 2)], model.weight.data)

    backward(model)

    assert {tensor.evidence for tensor in observed.events(ModelPlan)[0].tensors} == {
        ReplicaEvidence.WORLD
    }
