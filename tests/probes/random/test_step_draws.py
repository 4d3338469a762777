from __future__ import annotations

import pytest
import torch
from torch import nn

from distdiag.events.data import ModelFed
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs + torch.randn_like(inputs)).square().mean()


def train(model: nn.Module, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        scale = torch.rand(4, 2)
        loss = model(scale * number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fed(observed: Observed) -> list[ModelFed]:
    for probe in observed.probes:
        probe.flush()
    return observed.events(ModelFed)


def test_draws_are_told_with_the_state_before_them(observed: Observed, fake_group: None) -> None:
    observed.install("steps", "data")

    train(ddp(Noisy()))

    first, *later = fed(observed)
    assert first.draws == ()  # what is drawn before the first pass may be weights
    assert [event.number for event in later] == [1, 2]
    for event in later:
        assert event.model == "DDP Noisy"
        assert event.members == (0, 1)
        assert event.batch_sizes == (4,)
        assert [(draw.api, draw.is_inside) for draw in event.draws] == [
            ("rand", False),
            ("randn_like", True),
        ]
    assert len({draw.state for event in later for draw in event.draws}) == 4


def test_numbers_and_generators_stay_what_they_were(observed: Observed, fake_group: None) -> None:
    torch.manual_seed(3)
    plain = train(ddp(Noisy())), torch.get_rng_state()
    observed.install("steps", "data")
    torch.manual_seed(3)
    watched = train(ddp(Noisy())), torch.get_rng_state()

    assert plain[0] == watched[0]
    assert torch.equal(plain[1], watched[1])


def test_functions_stay_what_they_are(observed: Observed) -> None:
    original = torch.randn
    observed.install("data")

    assert torch.randn is original
    with torch.device("meta"):
        assert torch.randn(2).device.type == "meta"


@pytest.mark.filterwarnings("ignore")
def test_compiled_and_scripted_code_is_left_alone(observed: Observed) -> None:
    observed.install("steps", "data")

    def noisy(inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn_like(inputs)

    compiled = torch.compile(noisy, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    expected = noisy(torch.ones(4))
    torch.manual_seed(0)
    assert torch.equal(compiled(torch.ones(4)), expected)


def test_a_failure_of_the_probe_is_kept_from_the_program(
    observed: Observed, fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = {probe.name: probe for probe in observed.install("steps", "data")}

    def explode(*_: object) -> str:
        raise RuntimeError("injected")

    monkeypatch.setattr("distdiag.probes.random.step_draws._state", explode)
    assert len(train(ddp(Noisy()))) == 3
    assert probes["step-draws"].is_off
