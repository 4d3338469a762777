"""Gradients that are clipped with and without the factor of a scaler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from distdiag.events.updates import ScaledClip
from tests.probes.conftest import Observed

Scaler = torch.amp.GradScaler
Step = Callable[[Scaler, nn.Module, torch.optim.Optimizer], object]


def clips_of(observed: Observed, step: Step, *, enabled: bool = True) -> list[ScaledClip]:
    observed.install("steps", "clipped-scales")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Scaler("cpu", init_scale=1024.0, enabled=enabled)
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        step(scaler, model, optimizer)
        scaler.update()
        optimizer.zero_grad()
    return observed.events(ScaledClip)


def clip_and_step(scaler: Scaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)


def clip_and_unscale(scaler: Scaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), clip_value=0.5)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def unscale_and_clip(scaler: Scaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    clip_and_step(scaler, model, optimizer)


def step_another(scaler: Scaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = nn.Linear(4, 2)
    other(torch.ones(1, 4)).sum().backward()
    clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("step", "api", "limit"),
    [(clip_and_step, "clip_grad_norm_", 1.0), (clip_and_unscale, "clip_grad_value_", 0.5)],
)
def test_a_clip_of_scaled_gradients_is_told_once(
    observed: Observed, step: Step, api: str, limit: float
) -> None:
    (clip,) = clips_of(observed, step)
    assert (clip.api, clip.limit, clip.scale, clip.optimizer) == (api, limit, 1024.0, "SGD")
    assert clip.site.frames[0].function == step.__name__


@pytest.mark.parametrize("step", [unscale_and_clip, step_another])
def test_other_clips_are_silent(observed: Observed, step: Step) -> None:
    assert not clips_of(observed, step)


def test_a_scaler_that_is_off_scales_nothing(observed: Observed) -> None:
    assert not clips_of(observed, clip_and_step, enabled=False)
