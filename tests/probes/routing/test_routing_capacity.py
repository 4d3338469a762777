from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag.events.routing import TokensExchanged
from tests.probes.conftest import Observed
from tests.probes.routing.test_routing import reported
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")

DIM = 4


class Layer(nn.Module):
    """Four experts, of which each token gets one; each takes six tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.expert = nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        scores, chosen = self.gate(tokens).softmax(-1).topk(1, -1)
        self.limit(chosen)
        out = torch.empty(24, DIM)
        dist.all_to_all_single(out, torch.randn(24, DIM))
        return self.expert(tokens) * scores

    def limit(self, chosen: Tensor) -> None:
        """Say nothing of a capacity."""


class Compared(Layer):
    def limit(self, chosen: Tensor) -> None:
        mask = nn.functional.one_hot(chosen.squeeze(-1), 4)
        position = (mask.cumsum(0) - 1) * mask
        assert (position < torch.tensor(6)).any()


class Spread(Layer):
    def limit(self, chosen: Tensor) -> None:
        mask = nn.functional.one_hot(chosen.squeeze(-1), 4)
        position = ((torch.cumsum(mask, 0) - 1) * mask).sum(-1)
        nn.functional.one_hot(position, num_classes=32)


class Buffered(Layer):
    def limit(self, chosen: Tensor) -> None:
        torch.zeros(4, 6, DIM)


class Batched(Layer):
    def forward(self, tokens: Tensor) -> Tensor:
        rows = super().forward(tokens.reshape(-1, DIM))
        return rows.reshape(4, -1, DIM)


class OwnExperts(Layer):
    """Which tokens are for the experts of this rank is no capacity."""

    def limit(self, chosen: Tensor) -> None:
        assert ((chosen >= 0) & (chosen < 2)).shape == chosen.shape


def exchanged(observed: Observed, layer: Layer) -> list[TokensExchanged]:
    observed.install("process-groups", "collectives", "steps", "routing")
    model = ddp(nn.Sequential(layer))
    model(torch.randn(32, DIM, requires_grad=True)).sum().backward()
    reported(observed)
    return observed.events(TokensExchanged)


@pytest.mark.parametrize(
    ("layer", "capacity"), [(Layer, 0), (Compared, 6), (Spread, 32), (Buffered, 6), (OwnExperts, 0)]
)
def test_an_exchange_is_reported_with_the_capacity(
    observed: Observed, layer: type[Layer], capacity: int
) -> None:
    (event,) = exchanged(observed, layer())
    assert (event.layer, event.num_tokens, event.num_experts, event.k) == ("0", 32, 4, 1)
    assert event.capacity == capacity
    (call,) = [c for c in observed.calls() if c.signature.op == "all_to_all_single"]
    assert event.call == call.seq


def test_sequences_are_no_places_though_there_are_as_many_as_experts(observed: Observed) -> None:
    observed.install("process-groups", "collectives", "steps", "routing")
    ddp(nn.Sequential(Batched()))(torch.randn(4, 8, DIM, requires_grad=True)).sum().backward()
    (event,) = reported(observed)
    assert event.load is not None
    assert event.load.dropped_share == -1.0


def test_an_exchange_before_anything_was_chosen_is_none_of_tokens(observed: Observed) -> None:
    class Early(Layer):
        def forward(self, tokens: Tensor) -> Tensor:
            dist.all_to_all_single(torch.empty(24, DIM), torch.randn(24, DIM))
            return self.expert(tokens)

    assert exchanged(observed, Early()) == []


def test_a_failure_while_the_capacity_is_read_stays_here(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distdiag.probes.routing.passes import CapacitySearch

    def broken(*_: object) -> None:
        raise RuntimeError("of our own")

    monkeypatch.setattr(CapacitySearch, "_choose", broken)
    observed.install("process-groups", "collectives", "steps", "routing")
    out = ddp(nn.Sequential(Compared()))(torch.randn(32, DIM))
    assert out.shape == (32, DIM)
    assert observed.probes[-1].is_off


class Uneven(Compared):
    """All 24 tokens go to the first of the experts, which takes six of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        gate = self.gate(tokens).softmax(-1) + torch.tensor([2.0, 0.0, 0.0, 0.0])
        scores, chosen = gate.topk(1, -1)
        self.limit(chosen)
        return self.expert(tokens) * scores


def test_the_share_of_choices_beyond_the_capacity_is_reported(observed: Observed) -> None:
    observed.install("steps", "routing")
    model = ddp(nn.Sequential(Uneven(), OwnExperts()))
    model(torch.randn(24, DIM, requires_grad=True)).sum().backward()
    first, second = reported(observed)
    assert first.load is not None and second.load is not None
    assert first.load.dropped_share == pytest.approx(0.75)
    assert second.load.dropped_share == -1.0
