from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag.events.routing import CountsHeld
from tests.probes.conftest import Observed
from tests.probes.routing.test_routing import reported
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")


class Layer(nn.Module):
    """Four experts, of which each token gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.expert = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        scores, chosen = self.gate(tokens).softmax(-1).topk(1, -1)
        self.count(chosen.flatten())
        return self.expert(tokens) * scores

    def count(self, chosen: Tensor) -> None:
        """Count nothing."""


class Buffered(Layer):
    def count(self, chosen: Tensor) -> None:
        self.seen += torch.bincount(chosen, minlength=4)


class Scattered(Layer):
    def count(self, chosen: Tensor) -> None:
        ones = torch.ones(len(chosen), dtype=torch.bfloat16)
        torch.zeros(4, dtype=torch.bfloat16).scatter_add_(0, chosen, ones)
        self.seen.scatter_add_(0, chosen, ones)


class Reduced(Layer):
    def count(self, chosen: Tensor) -> None:
        counts = nn.functional.one_hot(chosen, 4).to(torch.bfloat16).sum(0)
        dist.all_reduce(counts)
        self.load = counts


class Wide(Layer):
    """Counts in integers; another sum of few bits passes the ranks, too."""

    def count(self, chosen: Tensor) -> None:
        counts = torch.bincount(chosen, minlength=4)
        dist.all_reduce(counts)
        self.load = counts.to(torch.bfloat16) / 32


class Weighed(Layer):
    """What weighs the experts is no count."""

    def count(self, chosen: Tensor) -> None:
        weights = torch.rand(len(chosen), dtype=torch.bfloat16)
        self.seen.scatter_add_(0, chosen, weights)


def held(observed: Observed, layer: Layer) -> list[tuple[str, str]]:
    observed.install("process-groups", "collectives", "steps", "routing")
    model = ddp(nn.Sequential(layer))
    model(torch.randn(32, 4, requires_grad=True)).sum().backward()
    reported(observed)
    return [(event.how, event.dtype) for event in observed.events(CountsHeld)]


@pytest.mark.parametrize(
    ("layer", "how"),
    [(Buffered, "added up"), (Scattered, "added up"), (Reduced, "all-reduced")],
)
def test_counts_of_few_bits_are_reported(observed: Observed, layer: type[Layer], how: str) -> None:
    assert held(observed, layer()) == [(how, "bfloat16")]
    (event,) = observed.events(CountsHeld)
    assert 8 <= event.greatest <= 32
    assert event.layer == "0"


@pytest.mark.parametrize("layer", [Layer, Wide, Weighed])
def test_counts_that_are_not_summed_up_in_few_bits_are_not(
    observed: Observed, layer: type[Layer]
) -> None:
    assert held(observed, layer()) == []
