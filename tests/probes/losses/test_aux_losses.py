from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.routing import AuxLoss, Routing
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")


class Inject(torch.autograd.Function):
    """Pass a tensor on, and let a loss have a gradient of one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(())


class Layer(nn.Module):
    """Four experts; `finish` is given the weights of a token's experts and the auxiliary loss."""

    def __init__(self, finish: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.finish = finish
        self.loss = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.gate(tokens).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        share = F.one_hot(chosen, 4).float().sum(1).mean(0)
        self.loss = (share * scores.mean(0)).sum() * 4
        weights = self.finish(weights, self.loss)
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return (picked * weights.unsqueeze(-1)).sum(1)


def thrown(weights: Tensor, loss: Tensor) -> Tensor:
    Inject.apply(weights, loss)
    return weights


def plain(weights: Tensor, loss: Tensor) -> Tensor:
    return weights


def used(weights: Tensor, loss: Tensor) -> Tensor:
    return Inject.apply(weights, loss)


def trained(observed: Observed, layer: Layer, *, adds: bool = False) -> AuxLoss:
    observed.install("steps", "routing")
    model = ddp(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = F.cross_entropy(model(torch.randn(32, 4)), torch.arange(32) % 4)
    (total + 0.01 * layer.loss if adds else total).backward()
    optimizer.step()
    assert not observed.events(ProbeDisabled)
    (event,) = observed.events(AuxLoss)
    return event


@pytest.mark.parametrize(
    ("finish", "adds", "num_injected", "num_used"),
    [
        (thrown, False, 1, 0),
        (used, False, 1, 1),
        (plain, False, 0, 0),
        (plain, True, 0, 1),
        (thrown, True, 1, 1),
    ],
)
def test_it_is_reported_whether_a_gradient_comes_by(
    finish: Callable[[Tensor, Tensor], Tensor],
    adds: bool,
    num_injected: int,
    num_used: int,
    observed: Observed,
) -> None:
    event = trained(observed, Layer(finish), adds=adds)
    assert (event.num_passes, event.num_computed) == (1, 1)
    assert (event.num_injected, event.num_used) == (num_injected, num_used)
    assert event.step == 0


def test_the_coefficient_of_the_module_is_reported(observed: Observed) -> None:
    layer = Layer(plain)
    layer.aux_loss_coef = 0.01
    assert trained(observed, layer).coefficient == "aux_loss_coef = 0.01"


@pytest.mark.parametrize(("finish", "steps"), [(plain, [0, 97, 99, 100]), (used, [0, 97, 100])])
def test_a_loss_that_was_not_used_is_also_looked_at_before_each_hundredth_step(
    finish: Callable[[Tensor, Tensor], Tensor], steps: list[int], observed: Observed
) -> None:
    observed.install("steps", "routing")
    model = ddp(Layer(finish))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(6):
        F.cross_entropy(model(torch.randn(32, 4)), torch.arange(32) % 4).backward()
        optimizer.step()
        if number == 0:
            observed.recorder.step = 97
    assert [event.step for event in observed.events(AuxLoss)] == steps


def looked_at(layer: Layer, observed: Observed, *, first_use: int = 1000) -> list[int]:
    """The steps of 24 that are looked at, where the loss is used from one of them on."""
    observed.install("steps", "routing")
    model = ddp(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(24):
        total = F.cross_entropy(model(torch.randn(32, 4)), torch.arange(32) % 4)
        (total + 0.01 * layer.loss if number >= first_use else total).backward()
        optimizer.step()
    return [event.step for event in observed.events(AuxLoss)]


def test_a_loss_that_is_meant_to_be_used_is_looked_for_until_it_is(observed: Observed) -> None:
    layer = Layer(plain)
    layer.aux_loss_coef = 0.01
    assert looked_at(layer, observed) == list(range(20))


def test_a_loss_that_was_used_is_no_longer_looked_for(observed: Observed) -> None:
    layer = Layer(plain)
    layer.aux_loss_coef = 0.01
    assert looked_at(layer, observed, first_use=10) == list(range(11))
    assert [event.num_used for event in observed.events(AuxLoss)] == [0] * 10 + [1]


class Later(Layer):
    """The auxiliary loss is made of scores that the layer has left behind."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.scores = self.gate(tokens).softmax(-1)
        self.entropy = -(self.scores * self.scores.log()).sum()
        weights, chosen = self.scores.topk(2, -1)
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        self.loss = (self.scores.mean(0) ** 2).sum() * 4
        return (picked * weights.unsqueeze(-1)).sum(1)


def test_a_loss_that_is_made_elsewhere_is_seen_whenever_it_is_looked_for(
    observed: Observed,
) -> None:
    observed.install("steps", "routing", "losses")
    layer = Later(plain)
    layer.aux_loss_coef = 0.01
    model = ddp(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(12):
        total = F.cross_entropy(model(torch.randn(32, 4)), torch.arange(32) % 4)
        balance = (layer.scores.mean(0) ** 2).sum() * 4
        (total + 0.01 * balance if number == 9 else total).backward()
        optimizer.step()
    assert [event.num_used for event in observed.events(AuxLoss)] == [0] * 9 + [1]


def test_a_number_for_the_log_is_not_looked_for(observed: Observed) -> None:
    assert looked_at(Layer(plain), observed) == list(range(4))


def test_no_graph_is_kept_alive(observed: Observed) -> None:
    layer = Layer(used)
    trained(observed, layer)
    gc.collect()
    result = layer(torch.randn(32, 4))
    node = weakref.ref(Inject.apply(result, layer.loss).grad_fn)
    layer.loss = torch.zeros(())
    del result
    assert node() is None


def test_functions_are_left_alone_when_the_steps_are_over(observed: Observed) -> None:
    apply = vars(torch.autograd.Function)["apply"]
    trained(observed, Layer(plain))
    assert vars(torch.autograd.Function)["apply"] is not apply
    for probe in observed.probes:
        probe.uninstall()
    assert vars(torch.autograd.Function)["apply"] is apply


def test_without_a_look_at_losses_nothing_is_said_of_auxiliary_losses(observed: Observed) -> None:
    observed.install("steps", "routing", profile="light")
    apply = vars(torch.autograd.Function)["apply"]
    model = ddp(nn.Sequential(Layer(thrown)))
    model(torch.randn(8, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert vars(torch.autograd.Function)["apply"] is apply
    assert len(observed.events(Routing)) == 1
    assert not observed.events(AuxLoss)
    assert not observed.events(ProbeDisabled)


class Detached(Layer):
    """Its auxiliary loss has no graph, though it is scaled to be a part of the loss."""

    def __init__(self, coefficient: float, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(plain)
        self.aux_loss_coef = coefficient
        self.loss_of = loss_of

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.gate(tokens).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        share = F.one_hot(chosen, 4).float().sum(1).mean(0)
        self.loss = self.loss_of(share, scores) * self.aux_loss_coef
        return tokens * weights.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda share, scores: (share * scores.detach().mean(0)).sum(),
        lambda share, scores: (share * share).sum(),
    ],
    ids=["detached scores", "counts alone"],
)
def test_a_loss_without_a_graph_is_computed_and_not_used(
    observed: Observed, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> None:
    event = trained(observed, Detached(0.01, loss_of), adds=True)
    assert (event.num_passes, event.num_computed, event.num_used) == (1, 1, 0)
    assert event.coefficient == "aux_loss_coef = 0.01"


def test_scores_that_a_bias_is_added_to_for_the_choice_alone_get_gradients(
    observed: Observed,
) -> None:
    class Biased(Detached):
        def forward(self, tokens: Tensor) -> Tensor:
            scores = self.gate(tokens).sigmoid()
            chosen = (scores + torch.zeros(4)).topk(2, -1)[1]
            self.loss = (scores.mean(0) * scores.mean(0)).sum() * self.aux_loss_coef
            return tokens * scores.gather(1, chosen).sum(-1, keepdim=True)

    event = trained(observed, Biased(0.01, lambda share, _: share.sum()))
    assert (event.num_passes, event.num_computed, event.num_used) == (1, 1, 0)


def test_a_loss_with_a_graph_is_used_though_its_value_is_logged(observed: Observed) -> None:
    class Logged(Detached):
        def forward(self, tokens: Tensor) -> Tensor:
            out = super().forward(tokens)
            self.logged = self.loss.detach() * self.aux_loss_coef
            return out

    event = trained(
        observed, Logged(0.01, lambda share, scores: (share * scores.mean(0)).sum()), adds=True
    )
    assert (event.num_computed, event.num_used) == (1, 1)
