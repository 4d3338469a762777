"""What a rank writes down of its loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from distdiag.events.checkpoints import LoadWasted, TrainingResumed, Waste, WeightsLoaded
from distdiag.events.lifecycle import ProbeDisabled
from tests.probes.conftest import Observed

State = Mapping[str, torch.Tensor]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))


def without(state: State, prefix: str) -> State:
    return {name: value for name, value in state.items() if not name.startswith(prefix)}


def step(trained: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(trained.parameters())
    trained(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


def test_a_prefix_is_recognised(observed: Observed) -> None:
    observed.install("steps", "loads")
    loading, state = model(1), model().state_dict()
    loading.load_state_dict({f"module.{n}": v for n, v in state.items()}, strict=False)
    step(loading)
    (event,) = observed.events(WeightsLoaded)
    assert (event.num_loaded, event.num_missing, event.num_untouched) == (0, 8, 8)
    assert (event.given_prefix, event.wanted_prefix, event.num_renamed) == ("module.", "", 8)
    assert not observed.events(ProbeDisabled)


def test_a_layer_that_is_missing_amid_others_is_a_hole(observed: Observed) -> None:
    observed.install("steps", "loads")
    loading = model(1)
    loading.load_state_dict(without(model().state_dict(), "1."), strict=False)
    step(loading)
    (event,) = observed.events(WeightsLoaded)
    assert event.holes == ("1.0.weight", "1.0.bias")
    assert not event.is_refused


def test_a_refusal_that_was_caught_is_seen(observed: Observed) -> None:
    observed.install("steps", "loads")
    loading = model(1)
    try:
        loading.load_state_dict(without(model().state_dict(), "3."))
    except RuntimeError:
        loading.load_state_dict(without(model().state_dict(), "3."), strict=False)
    step(loading)
    (event,) = observed.events(WeightsLoaded)
    assert event.is_refused
    assert event.missing == ("3.0.weight", "3.0.bias")


def test_loads_in_parts_and_values_set_by_hand_leave_nothing_out(observed: Observed) -> None:
    observed.install("steps", "loads")
    loading, state = model(1), model().state_dict()
    loading.load_state_dict(without(without(state, "1."), "2."), strict=False)
    loading[1].load_state_dict(model()[1].state_dict())
    loading[2][0].weight.data.zero_()
    with torch.no_grad():
        loading[2][0].bias.zero_()
    step(loading)
    assert not observed.events(WeightsLoaded)


def test_values_that_were_drawn_anew_are_seen(observed: Observed, fake_group: None) -> None:
    observed.install("steps", "loads")
    for is_anew in (False, True):
        loading = model(1)
        loading.load_state_dict(model().state_dict())
        for module in loading.modules():
            if is_anew and isinstance(module, nn.Linear):
                module.reset_parameters()
        step(loading)
        observed.recorder.step = 0
        assert len(observed.events(LoadWasted)) == is_anew
    (event,) = observed.events(LoadWasted)
    assert event.waste is Waste.OVERWRITTEN


def test_a_state_of_an_optimizer_that_was_made_anew_is_lost(
    observed: Observed, fake_group: None
) -> None:
    trained = model()
    before = torch.optim.AdamW(trained.parameters())
    step(trained, before)
    observed.install("steps", "loads")
    optimizer = torch.optim.AdamW(trained.parameters())
    optimizer.load_state_dict(before.state_dict())
    optimizer = torch.optim.AdamW(trained.parameters())
    step(trained, optimizer)
    (event,) = observed.events(TrainingResumed)
    assert (event.was_restored, event.num_lost, event.num_stateless) == (False, 8, 8)


@pytest.mark.parametrize("asks_rightly", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_state_that_a_fresh_optimizer_does_not_ask_for_is_left_out(
    observed: Observed, lone_group: None, tmp_path: Path, kind: Any, asks_rightly: bool
) -> None:
    def state(of: nn.Module, by: torch.optim.Optimizer) -> dict[str, Any]:
        if asks_rightly:
            return dict(zip(("model", "optimizer"), get_state_dict(of, by), strict=True))
        return {"model": of.state_dict(), "optimizer": by.state_dict()}

    trained = model()
    optimizer = kind(trained.parameters(), lr=0.1)
    step(trained, optimizer)
    dcp.save(state(trained, optimizer), checkpoint_id=tmp_path / "last")
    observed.install("steps", "loads", "rank-states")
    observed.recorder.step = 9  # earlier in this process another one has stepped
    trained = model(1)
    optimizer = kind(trained.parameters(), lr=0.1)
    asked = state(trained, optimizer)
    dcp.load(asked, checkpoint_id=tmp_path / "last")
    if asks_rightly:
        states = {"model_state_dict": asked["model"], "optim_state_dict": asked["optimizer"]}
        set_state_dict(trained, optimizer, **states)
    else:
        trained.load_state_dict(asked["model"])
        optimizer.load_state_dict(asked["optimizer"])
    step(trained, optimizer)
    is_lost = kind is torch.optim.AdamW and not asks_rightly
    found = [each.num_left_out for each in observed.events(TrainingResumed)]
    assert [number for number in found if number] == [8] * is_lost


def test_what_a_restored_optimizer_makes_anew_is_counted(observed: Observed) -> None:
    trained = model()
    saved = torch.optim.AdamW(trained.parameters())
    step(trained, saved)
    state = saved.state_dict()
    state["state"] = {number: each for number, each in state["state"].items() if number % 2}
    observed.install("steps", "loads")
    observed.recorder.step = 9
    optimizer = torch.optim.AdamW(trained.parameters())
    optimizer.load_state_dict(state)
    step(trained, optimizer)
    (event,) = observed.events(TrainingResumed)
    assert (event.was_restored, event.num_stateless, event.num_made) == (True, 4, 4)
