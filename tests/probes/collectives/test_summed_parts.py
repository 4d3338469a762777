"""What is written down of a sum that a layer makes over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distdiag.events.models import PartsSummed
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


class Layer(nn.Module):
    def __init__(self, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        dist.all_reduce(x.detach(), op=self.op)
        return x


def run(observed: Observed, model: nn.Module, given: torch.Tensor | None = None) -> None:
    model(torch.ones(2, 4) if given is None else given)
    observed.signals.step_ended.emit()


def test_a_sum_is_written_down_with_its_layer_and_weights(observed: Observed) -> None:
    observed.install("collectives", "steps", "summed-parts")
    model = nn.Sequential(nn.Linear(4, 4), Layer())
    run(observed, model)
    (event,) = observed.events(PartsSummed)
    assert event.module.endswith("/1")
    assert [name for name, _ in event.weights] == ["1.up.weight"]
    assert event.members == (0, 1)
    assert event.site.location is not None
    assert event.site.location.file == __file__


@pytest.mark.parametrize(
    "model",
    [Layer(dist.ReduceOp.MAX), Layer().eval()],
)
def test_other_operators_and_evaluations_are_left_alone(
    observed: Observed, model: nn.Module
) -> None:
    observed.install("collectives", "steps", "summed-parts")
    run(observed, model)
    assert not observed.events(PartsSummed)


def test_zeros_are_the_same_everywhere_and_say_nothing(observed: Observed) -> None:
    observed.install("collectives", "steps", "summed-parts")
    model = Layer()
    nn.init.zeros_(model.up.weight)
    run(observed, model)
    assert not observed.events(PartsSummed)


def test_a_sum_outside_of_modules_is_left_alone(observed: Observed) -> None:
    observed.install("collectives", "steps", "summed-parts")
    dist.all_reduce(torch.ones(4, 4))
    observed.signals.step_ended.emit()
    assert not observed.events(PartsSummed)
