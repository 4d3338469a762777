"""Biases by which routers choose, as frameworks keep them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.probes.conftest import Observed
from tests.probes.routing.test_routing import reported
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")


class TokenChoiceTopKRouter(nn.Module):
    """Is given the bias by the layer around it, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6, bias=False)
        self.num_experts = 6

    def forward(self, x: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x).to(torch.float32))
        by = scores if expert_bias is None else scores + expert_bias
        _, chosen = torch.topk(by, k=2, dim=1)
        counts = torch.histc(chosen.view(-1).float(), bins=6, min=0, max=6)
        return scores.gather(dim=1, index=chosen), chosen, counts


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = TokenChoiceTopKRouter()
        self.experts = nn.Linear(4, 4)
        self.register_buffer("expert_bias", torch.zeros(6))
        self.register_buffer("tokens_per_expert", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        scores, _, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        return self.experts(x) * scores.sum(-1, keepdim=True)


class Corrected(nn.Module):
    """Keeps a frozen parameter, chooses groups of experts first, and adds other things too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6)
        self.n_routed_experts = 6
        self.e_score_correction_bias = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("calls", torch.zeros(6))
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        scores = self.gate(x).sigmoid()
        by = scores + self.e_score_correction_bias.unsqueeze(0)
        best = by.view(-1, 2, 3).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1)[1]
        mask = torch.zeros(len(x), 2).scatter_(1, best, 1).repeat_interleave(3, 1)
        chosen = by.masked_fill(mask == 0, 0.0).topk(2, dim=-1)[1]
        self.calls = self.calls + 1
        return x * scores.gather(1, chosen).sum(-1, keepdim=True)


def test_a_bias_of_the_layer_around_or_of_the_gate_itself_is_found(observed: Observed) -> None:
    observed.install("steps", "routing")
    model = nn.Sequential(MoE(), Corrected())
    ddp(model)(torch.randn(32, 4)).sum().backward()
    layers = [event.layer for event in reported(observed)]
    assert layers[0] == "0.router"
    assert set(layers[1:]) == {"1"}
    found = {
        (path, name)
        for path, module in model.named_modules()
        for name in (*module._buffers, *module._parameters)
        if observed.wiring.routing_biases.has(module, name)
    }
    assert found == {("0", "expert_bias"), ("1", "e_score_correction_bias")}


def test_a_bias_that_the_program_replaces_stays_one(observed: Observed) -> None:
    observed.install("steps", "routing")
    model = nn.Sequential(MoE())
    ddp(model)(torch.randn(32, 4)).sum().backward()
    layer = model[0]
    assert isinstance(layer, MoE)
    layer.expert_bias = layer.expert_bias + 1
    assert observed.wiring.routing_biases.has(layer, "expert_bias")
    assert not observed.wiring.routing_biases.has(layer, "tokens_per_expert")
