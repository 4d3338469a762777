from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.lifecycle import ProbeDisabled, StepEnd
from distdiag.events.models import ModelState, Moment
from distdiag.probes.models import snapshot
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward, ddp, fsdp2, network, reported, train

pytestmark = pytest.mark.usefixtures("fake_group")

BACKWARD, GRADIENT, STEP = Moment.BACKWARD, Moment.GRADIENT, Moment.STEP


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Models of earlier tests that only wait for the collector are not this test's."""
    gc.collect()


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [{**part.__dict__} for part in model.modules()]


def test_looking_changes_nothing(observed: Observed) -> None:
    observed.install("steps")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backward(model)
    tensors = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters()]]

    def now() -> tuple[object, ...]:
        versions = [tensor._version for tensor in tensors]
        names = [list(each) for each in attributes(model)]
        return torch.is_grad_enabled(), versions, names, list(optimizer.state)

    before, random = now(), torch.get_rng_state()
    signals = observed.signals
    signals.before_first_forward.emit()
    signals.before_backward.emit()
    signals.backward_ended.emit(True)
    signals.optimizer_stepping.emit(optimizer, sys._getframe())

    assert [moment for moment, _ in reported(observed)][-3:] == [BACKWARD, GRADIENT, STEP]
    assert now() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not observed.events(ProbeDisabled)


def test_a_model_without_the_snapshots_has_the_same_attributes(observed: Observed) -> None:
    observed.install("steps")
    watched = network()
    train(watched)
    names = [set(each) for each in attributes(watched)]
    observed.uninstall()

    plain = network()
    train(plain)

    assert names == [set(each) for each in attributes(plain)]


def test_training_comes_to_the_same_numbers(observed: Observed) -> None:
    def result() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        train(model, 4)
        return list(model.state_dict().values())

    plain = result()
    observed.install("steps")

    assert all(map(torch.equal, plain, result()))


def test_a_look_that_fails_switches_the_snapshots_off_and_training_goes_on(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no plan today")

    monkeypatch.setattr(snapshot, "plan_of", broken)
    observed.install("steps")
    model = ddp(network())
    before = model.module[0].weight.clone()

    train(model, 3)

    (disabled,) = observed.events(ProbeDisabled)
    assert (disabled.probe, disabled.reason) == ("models", "ValueError: no plan today")
    assert not observed.events(ModelState)
    assert len(observed.events(StepEnd)) == 3
    assert not torch.equal(model.module[0].weight, before)


def test_what_was_replaced_is_put_back(observed: Observed) -> None:
    places = [
        (nn.Module, "__init__"),
        (nn.Module, "__setstate__"),
        (torch.optim.Optimizer, "_patch_step_function"),
        (DistributedDataParallel, "_ddp_init_helper"),
    ]
    before = [vars(owner)[name] for owner, name in places]
    observed.install("steps")
    assert all(vars(o)[n] is not old for (o, n), old in zip(places, before, strict=True))

    observed.uninstall()

    assert [vars(owner)[name] for owner, name in places] == before


def test_nothing_is_reported_after_it_was_taken_away(observed: Observed) -> None:
    observed.install("steps", "sharding-moments")
    model = nn.Sequential(nn.Linear(2, 4))
    fsdp2(model)
    observed.uninstall()

    train(model)

    assert not reported(observed)


def test_a_parameter_without_a_shape_yet_does_not_end_the_snapshots(observed: Observed) -> None:
    observed.install("steps")
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "later": nn.LazyLinear(2)})

    backward(model["body"])

    assert not observed.events(ProbeDisabled)
