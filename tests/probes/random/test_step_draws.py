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


def test_draws_are_reported_with_the_state_before_them(
    observed: Observed, fake_group: None
) -> None:
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


class Dropping(nn.Module):
    """Drops by a module, by a function, and by what has a probability of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.0), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.parts(inputs)
        return self.head(nn.functional.dropout(hidden, 0.1, self.training)).square().mean()


def inside(event: ModelFed) -> list[tuple[str, str]]:
    return [(draw.api, draw.module) for draw in event.draws if draw.is_inside]


BOTH = [("dropout", "parts.2 Dropout"), ("dropout", "Dropping")]


def test_dropout_is_reported_with_its_module_and_its_activation(
    observed: Observed, fake_group: None
) -> None:
    observed.install("steps", "data")
    torch.manual_seed(7)

    train(ddp(Dropping()))

    _, *later = fed(observed)
    for event in later:
        assert inside(event) == BOTH
        masks = [draw for draw in event.draws if draw.is_inside]
        assert all(draw.activation and draw.sizes == (4, 8) for draw in masks)
        assert len({draw.activation for draw in masks}) == 2
        assert event.seeded is not None
        assert any(frame.function.startswith("test_dropout") for frame in event.seeded.frames)


def test_the_first_passes_of_a_model_that_nothing_wraps_are_reported(
    observed: Observed, fake_group: None
) -> None:
    observed.install("steps", "data", "models")
    model = Dropping()

    train(model, 12)

    events = fed(observed)
    assert [event.number for event in events] == list(range(6))
    assert {(event.model, event.members) for event in events} == {("Dropping", ())}
    assert inside(events[-1]) == BOTH
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_model_that_is_evaluated_draws_no_masks(observed: Observed, fake_group: None) -> None:
    observed.install("steps", "data")
    model = ddp(Dropping())
    train(model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 2))

    assert all(inside(event) in ([], BOTH) for event in fed(observed))


def attending(inputs: torch.Tensor) -> torch.Tensor:
    rows = inputs[None, None]
    return nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)[0, 0]


class Attending(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(attending(inputs)).square().mean()


class Recurring(nn.GRU):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)[0].square().mean()


@pytest.mark.parametrize(
    ("model", "api"),
    [
        (Attending(2, 2), "scaled_dot_product_attention"),
        (Recurring(2, 2, num_layers=2, dropout=0.5), "gru"),
    ],
    ids=["attention", "recurrent"],
)
def test_so_is_dropout_within_other_operations(
    observed: Observed, fake_group: None, model: nn.Module, api: str
) -> None:
    observed.install("steps", "data", "sequence")

    train(ddp(model))

    assert [name for name, _ in inside(fed(observed)[-1])] == [api]


@pytest.mark.parametrize("wrapped", [True, False])
def test_masks_stay_what_they_were(observed: Observed, fake_group: None, wrapped: bool) -> None:
    def run() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(3)
        model = Dropping()
        return train(ddp(model) if wrapped else model), torch.get_rng_state()

    plain = run()
    observed.install("steps", "data", "models")
    watched = run()

    assert plain[0] == watched[0]
    assert torch.equal(plain[1], watched[1])
