"""Second sets of weights in files that trainings are resumed from, and what is saved there next."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distdiag.checks.ckp.rebuilt_average import RebuiltAverage
from distdiag.events.checkpoints import AverageSaved
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.findings.finding import Severity
from tests.checks.verdicts import findings
from tests.probes.conftest import Observed

STEPS, MORE, ROWS = 60, 6, 8


class Shadow:
    """An average that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update_parameters(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 0.02)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.weights

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in state.items()}


class Best(Shadow):
    """The weights of the first step that was taken."""

    def update_parameters(self, model: nn.Module) -> None:
        if not hasattr(self, "found"):
            self.found = True
            super().__init__(model)


class Teacher(nn.Sequential):
    """A copy that follows slowly."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(*copy.deepcopy(model).requires_grad_(False))

    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.detach(), 0.02)


class Later(AveragedModel):
    """An average of one step alone, of the first one after the resume."""

    def __init__(self, model: nn.Module, num_before: int = STEPS) -> None:
        super().__init__(model)
        self.register_buffer("num_left", torch.tensor(num_before))

    def update_parameters(self, model: nn.Module) -> None:
        if self.num_left == 0:
            super().update_parameters(model)
        self.num_left -= 1


def averaged(model: nn.Module) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    average.n_averaged.fill_(1)
    return average


def train(second: Any, file: Path, name: str, num_steps: int, *resumed: str) -> None:
    """Train, from the file if something is resumed, and save into it."""
    torch.manual_seed(len(resumed))
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    state = torch.load(file) if resumed else {}
    if "model" in resumed:
        net.load_state_dict(state["model"])
    if "average as model" in resumed:
        net.load_state_dict(state[name])
    if "optimizer" in resumed:
        optimizer.load_state_dict(state["optimizer"])
    average = second(net)
    if "average" in resumed:
        average.load_state_dict(state[name])
    if "average from file" in resumed:
        average.load_state_dict(torch.load(file)[name])
    late = state[name] if "average late" in resumed else None
    del state
    for _ in range(num_steps):
        x = torch.randn(ROWS, 8)
        optimizer.zero_grad()
        (net(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
        if late is not None:
            average.load_state_dict(late)
            late = None
        average.update_parameters(net)
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, name: average.state_dict()}, file)


def resumed(
    observed: Observed, tmp_path: Path, second: Any, name: str, *parts: str, more: int = MORE
) -> list[Any]:
    """Return what is said of a training that was resumed with these parts."""
    train(second, tmp_path / "state.pt", name, STEPS)
    observed.install("steps", "loads")
    train(second, tmp_path / "state.pt", name, more, *parts)
    assert not observed.events(ProbeDisabled)
    return [each for e in observed.events(AverageSaved) for each in findings(RebuiltAverage, e)]


@pytest.mark.parametrize(
    ("second", "name"), [(averaged, "ema"), (Shadow, "shadow_weights"), (Teacher, "teacher")]
)
def test_an_average_that_begins_anew_is_named(
    observed: Observed, tmp_path: Path, second: Any, name: str
) -> None:
    (finding,) = resumed(observed, tmp_path, second, name, "model", "optimizer")
    assert finding.severity is Severity.WARNING
    assert finding.message.startswith(f"{name} of the checkpoint was not loaded")
    assert finding.location is not None
    assert "torch.load(file)" in Path(__file__).read_text().splitlines()[finding.location.line - 1]


@pytest.mark.parametrize("second", [averaged, Shadow, Teacher])
@pytest.mark.parametrize("more", [1, MORE, STEPS])
def test_an_average_that_goes_on_is_silent(
    observed: Observed, tmp_path: Path, second: Any, more: int
) -> None:
    parts = ("model", "optimizer", "average")
    assert resumed(observed, tmp_path, second, "ema", *parts, more=more) == []


@pytest.mark.parametrize(
    "parts", [("model",), ("average as model",), ("average as model", "optimizer")]
)
def test_a_fine_tuning_may_begin_a_new_average(
    observed: Observed, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    assert resumed(observed, tmp_path, Teacher, "ema", *parts) == []


@pytest.mark.parametrize("how", ["average", "average late", "average from file"])
def test_an_average_that_begins_after_the_resume_is_silent_if_it_was_loaded(
    observed: Observed, tmp_path: Path, how: str
) -> None:
    assert resumed(observed, tmp_path, Later, "swa", "model", "optimizer", how, more=10) == []


@pytest.mark.parametrize(("second", "name"), [(Best, "best"), (Teacher, "target")])
def test_other_second_weights_are_at_most_a_note(
    observed: Observed, tmp_path: Path, second: Any, name: str
) -> None:
    found = resumed(observed, tmp_path, second, name, "model", "optimizer")
    assert [each.severity for each in found] == [Severity.INFO]


def test_a_short_memory_proves_nothing(observed: Observed, tmp_path: Path) -> None:
    """After so many steps an average that was loaded has forgotten what it was, too."""
    assert resumed(observed, tmp_path, averaged, "ema", "model", "optimizer", more=400) == []
