from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from distdiag.config.subjects import RoutingConfig
from distdiag.events.routing import Choice, Routing
from tests.probes.conftest import Observed
from tests.probes.routing.test_routing import reported
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")


class MapRouter(nn.Module):
    """Returns probabilities and a map of tokens and experts; a fused kernel would choose."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = (tokens @ self.weight).sigmoid()
        return scores, scores > scores.mean(-1, keepdim=True)


class FusedTopKRouter(nn.Module):
    """Returns logits, weights and indices, as the routers of VeOmni's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = tokens @ self.weight
        chosen = logits.argsort(-1, descending=True)[:, :2]
        return logits, logits.softmax(-1).gather(-1, chosen), chosen


class Unnamed(nn.Module):
    """Is given the experts of its tokens, and is called like nothing that routes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, *, ids: Tensor) -> Tensor:
        return self.linear(tokens) * (1 + ids[:, :1])


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.part, MapRouter):
            scores, chosen = self.part(tokens)
            return scores * chosen
        if isinstance(self.part, FusedTopKRouter):
            return tokens * self.part(tokens)[1].sum(-1, keepdim=True)
        ids = torch.arange(64).reshape(32, 2) % 4
        return self.part(tokens, ids=ids)


def routed(observed: Observed, part: nn.Module, *patterns: str) -> list[Routing]:
    observed.install("steps", "routing", routing=RoutingConfig(modules=patterns))
    ddp(Net(part))(torch.randn(32, 4, requires_grad=True)).sum().backward()
    return reported(observed)


def test_a_map_that_a_router_returns_is_reported_with_its_load(observed: Observed) -> None:
    (event,) = routed(observed, MapRouter())
    assert event.layer == "part"
    assert event.choice == Choice("routing map", 32, 4, 4, "int64")
    assert event.chosen
    assert event.scores == ""
    assert event.load is not None
    assert 1.0 <= event.load.peak < 2.5


def test_indices_beside_logits_and_weights_are_the_choice(observed: Observed) -> None:
    (event,) = routed(observed, FusedTopKRouter())
    assert event.choice == Choice("indices", 32, 4, 2, "int64")
    assert event.load is not None
    assert event.load.peak >= 1.0


def test_experts_that_a_named_module_is_given_are_reported(observed: Observed) -> None:
    (event,) = routed(observed, Unnamed(), "*part")
    assert (event.layer, event.choice.api) == ("part", "indices")
    assert (event.choice.num_tokens, event.choice.k) == (32, 2)
    assert event.chosen


def test_a_module_that_nobody_names_is_left_alone(observed: Observed) -> None:
    assert routed(observed, Unnamed(), "*other") == []
