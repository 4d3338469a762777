from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.probes.gradients.weighted_sums import weighted_sums
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        dist.all_to_all_single(torch.empty_like(rows), rows)
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        dist.all_to_all_single(torch.empty_like(gradient), gradient)
        return gradient * ctx.scale, None


class Net(nn.Module):
    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = scale
        self.between = lambda made: None

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        if self.scale is None:
            return self.last(self.expert(rows))
        made = self.expert(Exchange.apply(rows, 1.0))
        self.between(made)
        return self.last(Exchange.apply(made, self.scale))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def train(net: Net, num_steps: int = 1, before_step=lambda: None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(num_steps):
        net(torch.randn(6, 4)).square().sum().backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def reported(observed: Observed) -> list[GradientSums]:
    for probe in observed.probes:
        probe.flush()
    assert not observed.events(ProbeDisabled)
    return observed.events(GradientSums)


def ratios(event: GradientSums) -> dict[str, float]:
    return {each.name: each.given / each.found for each in event.gradients}


def test_what_nobody_touches_is_applied_as_it_was_given(observed):
    observed.install()
    train(Net(), 5)
    events = reported(observed)
    assert [event.step for event in events] == [0, 1, 2, 4]
    assert all(value == pytest.approx(1.0, rel=1e-3) for value in ratios(events[0]).values())
    assert not events[0].nodes


def test_a_hook_of_the_program_is_seen_though_it_was_there_first(observed):
    observed.install()
    net = Net()
    net.expert.weight.register_hook(lambda gradient: gradient / 4)
    train(net)
    found = ratios(reported(observed)[0])
    assert found["expert.weight"] == pytest.approx(4.0, rel=1e-3)
    assert found["first.weight"] == pytest.approx(1.0, rel=1e-3)


def test_gradients_that_the_program_divides_are_seen(observed):
    observed.install()
    net = Net()
    train(net, before_step=lambda: [p.grad.div_(2) for p in net.parameters()])
    assert all(
        value == pytest.approx(2.0, rel=1e-3) for value in ratios(reported(observed)[0]).values()
    )


def test_passes_whose_gradients_accumulate_are_added_up(observed):
    observed.install()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    (event,) = reported(observed)
    assert event.num_passes == 3
    assert all(len(each.passes) == 3 for each in event.gradients)
    assert all(value == pytest.approx(1.0, rel=1e-3) for value in ratios(event).values())


def test_of_many_passes_the_first_and_the_last_are_reported_apart(observed):
    observed.install()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(12):
        net(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    (event,) = reported(observed)
    assert event.num_passes == 12
    assert all(len(each.passes) == 8 for each in event.gradients)
    assert all(value == pytest.approx(1.0, rel=1e-3) for value in ratios(event).values())


def test_a_gradient_that_is_left_over_is_reported(observed):
    observed.install()
    net = Net()
    net.first.weight.grad = torch.ones(4, 4)
    train(net)
    left = {each.name: each.has_left for each in reported(observed)[0].gradients}
    assert left.pop("first.weight")
    assert set(left.values()) == {False}


def test_parameters_behind_an_exchange_and_its_factor_are_reported(observed):
    observed.install()
    train(Net(scale=0.5))
    _, back, there = reported(observed)[0].nodes
    assert back.parameters == ("expert.bias", "expert.weight")
    assert back.passed.norm / back.given.norm == pytest.approx(0.5, rel=1e-3)
    assert there.parameters == ("first.bias", "first.weight")
    assert there.passed.norm / there.given.norm == pytest.approx(1.0, rel=1e-3)
    assert back.calls[1] > back.calls[0]


def test_a_hook_between_the_exchange_and_the_experts_counts_as_its_factor(observed):
    observed.install()
    net = Net(scale=1.0)
    net.between = lambda made: made.register_hook(lambda gradient: gradient / 4)
    train(net)
    back = reported(observed)[0].nodes[1]
    assert back.passed.norm / back.given.norm == pytest.approx(0.25, rel=1e-3)


def test_results_and_random_numbers_stay_what_they_are(observed):
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        net = Net(scale=0.5)
        train(net, 4)
        return [*net.parameters(), torch.rand(3)]

    plain = run()
    observed.install()
    assert all(map(torch.equal, plain, run()))
    assert reported(observed)


def test_no_hook_stays_behind(observed):
    observed.install()
    net = Net(scale=0.5)
    train(net)
    assert all(not parameter._backward_hooks for parameter in net.parameters())


def test_its_own_failure_ends_the_probe_and_not_the_training(observed, monkeypatch):
    def explode(*_):
        raise RuntimeError("broken")

    observed.install()
    monkeypatch.setattr("distdiag.probes.gradients.sums.weighted_sums", explode)
    net = Net()
    train(net, 2)
    assert all(math.isfinite(p.sum().item()) for p in net.parameters())
    assert [event.probe for event in observed.events(ProbeDisabled)] == ["gradient-sums"]


@pytest.mark.parametrize("shape", [(5,), (7, 3), (600, 900), (3, 40, 500)])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_sums_of_shards_add_up_to_that_of_the_whole(shape, num_shards):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).reshape(-1)
    number = whole.numel()
    size = -(-number // num_shards)
    parts = [
        weighted_sums(whole[first : first + size], number, first)
        for first in range(0, number, size)
    ]
    assert torch.allclose(torch.stack(parts).sum(0), weighted_sums(whole, number))
    assert parts[0].all()


def test_weights_are_independent():
    weights = torch.eye(64).unbind()
    table = torch.stack([weighted_sums(each, 64)[:-1] for each in weights])
    assert torch.linalg.matrix_rank(table) == table.shape[1]
    assert table.abs().max() <= 1
