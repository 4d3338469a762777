from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.losses import AuxTerm, LossPass, LossWeights
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")

TOKENS, COEFFICIENT = 24, 0.015


class Net(nn.Module):
    """Scores classes after a layer of four experts; keeps the scores of its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(tokens)
        scores = logits.softmax(-1)
        weights, chosen = scores.topk(2, -1)
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        out = tokens + (picked * weights.unsqueeze(-1)).sum(1)
        return self.head(out), logits, F.one_hot(chosen, 4).float().sum(1)


def switch(logits: Tensor, chosen: Tensor) -> Tensor:
    return (logits.softmax(-1).mean(0) * chosen.mean(0)).sum() * 4


def summed(logits: Tensor, chosen: Tensor) -> Tensor:
    return (logits.softmax(-1).sum(0) / TOKENS * chosen.mean(0)).sum() * 4


def over_all_ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    return (logits.softmax(-1).sum(0) / (2 * TOKENS) * chosen.mean(0)).sum() * 4


def z_loss(logits: Tensor, _: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def read(
    observed: Observed, loss: Callable[[Tensor, Tensor, Tensor], Tensor], net: Net | None = None
) -> LossPass:
    observed.install("steps", "routing")
    model = ddp(net or Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(*model(torch.randn(TOKENS, 4))).backward()
    optimizer.step()
    assert not observed.events(ProbeDisabled)
    (event,) = observed.events(LossWeights)
    (found,) = event.passes
    assert found is not None
    assert found.kind == "nll"
    return found


def entropy(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(TOKENS) % 4)


def factors(term: AuxTerm) -> list[tuple[str, float]]:
    return [(each.op, each.value) for each in term.factors]


@pytest.mark.parametrize("aux", [switch, summed, z_loss])
def test_the_factors_of_an_auxiliary_loss_are_reported(
    aux: Callable[[Tensor, Tensor], Tensor], observed: Observed
) -> None:
    found = read(observed, lambda x, *scores: (entropy(x) + COEFFICIENT * aux(*scores)) * 2)
    (term,) = found.aux
    assert factors(term)[:2] == [("*", 2.0), ("*", COEFFICIENT)]
    assert (term.layer, term.num_outer, term.is_own_mean) == ("", 1, True)


def test_a_division_by_the_tokens_of_more_ranks_is_no_own_mean(observed: Observed) -> None:
    found = read(observed, lambda x, *scores: entropy(x) + over_all_ranks(*scores))
    (term,) = found.aux
    assert not term.is_own_mean


def test_what_goes_on_from_a_router_is_no_auxiliary_loss(observed: Observed) -> None:
    found = read(observed, lambda x, *_: entropy(x) + x.norm() + x.square().mean())
    assert found.aux == ()


def test_losses_of_other_layers_are_none(observed: Observed) -> None:
    found = read(observed, lambda x, logits, _: entropy(x) + (x.mean() * logits.mean()))
    assert found.aux == ()


class Inject(torch.autograd.Function):
    """Pass a tensor on; a loss beside it gets a gradient that is a part of one."""

    share = 1.0

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full((), Inject.share)


class Injecting(Net):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(tokens).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        counts = F.one_hot(chosen, 4).float().sum(1)
        loss = COEFFICIENT * (scores.mean(0) * counts.mean(0)).sum()
        weights = Inject.apply(weights, loss)  # type: ignore[no-untyped-call]
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return self.head(tokens + (picked * weights.unsqueeze(-1)).sum(1)), scores, counts


@pytest.mark.parametrize("num_passes", [1, 3, 4])
def test_the_weight_of_an_injected_loss_is_what_its_gradient_says(
    observed: Observed, monkeypatch: pytest.MonkeyPatch, num_passes: int
) -> None:
    monkeypatch.setattr(Inject, "share", 1 / num_passes)
    (term,) = read(observed, lambda x, *_: entropy(x), Injecting()).aux
    assert factors(term)[:2] == [("/", num_passes), ("*", pytest.approx(COEFFICIENT))]
    assert (term.num_outer, term.is_own_mean) == (0, True)


@pytest.mark.parametrize("share", [0.0, 0.4, 2.0, 1024.0])
def test_an_injected_loss_with_a_scale_of_its_own_is_left_out(
    observed: Observed, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(Inject, "share", share)
    assert read(observed, lambda x, *_: entropy(x), Injecting()).aux == ()


def test_a_mean_over_layers_is_reported_from_a_division(observed: Observed) -> None:
    found = read(
        observed,
        lambda x, *scores: entropy(x) + COEFFICIENT * torch.stack([switch(*scores)] * 2).mean(),
    )
    (term,) = found.aux
    assert ("mean", 2.0) in factors(term)
