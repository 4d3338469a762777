"""What is reported of the first step of a rank that nothing connects with others."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distdiag.events.lifecycle import SteppedAlone
from tests.probes.conftest import Observed


def step(num=2):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)


def test_the_first_step_of_a_rank_without_a_group_is_reported_once(
    launched: None, observed: Observed
) -> None:
    observed.install("steps")
    step()

    (event,) = observed.events(SteppedAlone)
    assert (event.num_launched, event.library, event.step) == (2, "", 0)
    assert event.site.location is not None
    assert event.site.location.function == "step"


def test_a_rank_in_a_group_is_not_alone(
    launched: None, fake_group: None, observed: Observed
) -> None:
    observed.install("steps")
    step()
    assert not observed.events(SteppedAlone)


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_a_rank_that_was_launched_alone_may_be_alone(
    launched: None, observed: Observed, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    observed.install("steps")
    step()
    assert not observed.events(SteppedAlone)


def test_a_library_that_trains_as_one_process_is_reported_in_spite_of_a_group(
    launched: None, fake_group: None, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import state

    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setattr(state.PartialState, "_shared_state", {"num_processes": 1})
    observed.install("steps")
    step()
    (event,) = observed.events(SteppedAlone)
    assert event.library == "accelerate"


def test_packages_that_may_connect_the_ranks_are_reported(
    launched: None, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace())  # type: ignore[arg-type]
    observed.install("steps")
    step()
    assert observed.events(SteppedAlone)[0].others == ("horovod",)
