"""What is seen of the steps of real optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distdiag.events.updates import (
    CastsReused,
    ClipMissed,
    OptimizerUpdate,
    PositionsRounded,
    ScalerStep,
    TensorUpdate,
)
from distdiag.probes.updates.samples import MOST_SAMPLED, sample, spacing_of
from tests.probes.conftest import Observed

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def narrow_network() -> nn.Module:
    return network().bfloat16()


def updates_of(
    observed: Observed, make: Optimizers, build: Callable[[], nn.Module] = network
) -> list[OptimizerUpdate]:
    observed.install("steps", "updates")
    model = build()
    train(model, make(model))
    for probe in observed.probes:
        probe.flush()
    return observed.events(OptimizerUpdate)


def named(look: OptimizerUpdate) -> dict[str, TensorUpdate]:
    return {each.name: each for each in look.tensors}


def test_looked_at_steps_are_the_first_and_powers_of_two(observed: Observed) -> None:
    found = updates_of(observed, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert [each.number for each in found] == [0, 1, 2, 4]
    assert found[0].rounds_to_nearest


def test_a_norm_in_bfloat16_stays_and_in_float32_it_moves(observed: Observed) -> None:
    found = updates_of(
        observed, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4), narrow_network
    )
    norm = named(found[-1])["1.weight"]
    assert norm.num_unchanged == norm.num_sampled == 16
    assert norm.num_moved == 0
    assert norm.spacing == 2**-7
    assert norm.update == pytest.approx(1e-4, rel=0.5)
    assert norm.expected_changes == pytest.approx(16 * norm.update / norm.spacing, rel=1e-3)
    assert dict(norm.state)["exp_avg"] == "bfloat16"


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    ],
)
def test_the_estimate_is_what_the_step_changes(observed: Observed, make: Optimizers) -> None:
    before = {name: each.detach().clone() for name, each in network().named_parameters()}
    found = updates_of(observed, make)
    assert all(each.num_unchanged <= 1 for each in found[0].tensors)
    first = named(found[0])["0.weight"]

    again = network()
    train(again, make(again), steps=1)
    change = (dict(again.named_parameters())["0.weight"] - before["0.weight"]).abs().mean().detach()
    assert first.update == pytest.approx(float(change), rel=0.05)


def test_a_copy_in_the_state_is_seen(observed: Observed) -> None:
    class Master(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                self.state[param].setdefault("master", param.detach().float())
            super().step()

    found = updates_of(observed, lambda model: Master(model.parameters(), lr=1e-6), narrow_network)
    assert all(each.keeps_precision for each in found[-1].tensors)


def test_the_spacing_of_numbers_is_that_of_the_type() -> None:
    weights = torch.tensor([1.0, 1.5, 2.0, -0.75, 0.0, 3e-5])
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weights.to(dtype)
        following = torch.nextafter(narrow.abs(), torch.tensor(float("inf"), dtype=dtype))
        expected = (following.double() - narrow.abs().double()).float()
        found = spacing_of(narrow.float(), dtype)
        assert torch.equal(found[:4], expected[:4])
        assert found[4] == 0
        assert found[5] == expected[5]


def test_a_sample_is_no_larger_than_it_should_be() -> None:
    for number in (1, MOST_SAMPLED, MOST_SAMPLED + 1, 10 * MOST_SAMPLED):
        assert 0 < sample(torch.zeros(number)).numel() <= MOST_SAMPLED


def test_nothing_is_drawn_and_weights_are_the_same(observed: Observed) -> None:
    plain = network()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    state = torch.get_rng_state()  # each training begins with the same seed
    model = network()
    observed.install("steps", "updates")
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(torch.get_rng_state(), state)


def test_skipped_steps_of_a_scaler_are_told_apart(observed: Observed) -> None:
    observed.install("steps", "scalers")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), float("nan"), 1.0):
        loss = model(torch.ones(1, 2)).sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = observed.events(ScalerStep)
    assert [each.is_skipped for each in found] == [False, True, True, False]
    assert [each.num_skipped for each in found] == [0, 1, 2, 0]
    assert [each.scale for each in found] == [4.0, 4.0, 2.0, 1.0]
    assert found[-1].num_stepped == 2


@pytest.mark.parametrize(("is_around_all", "num_events"), [(True, 1), (False, 0)])
def test_a_pass_in_the_region_of_a_step(
    observed: Observed, is_around_all: bool, num_events: int
) -> None:
    observed.install("steps", "autocast-casts")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_around_all:
        with torch.autocast("cpu", torch.bfloat16):
            train(model, optimizer)
    else:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(2, 16)).float().sum()
            loss.backward()
            optimizer.step()
    found = observed.events(CastsReused)
    assert len(found) == num_events
    assert all(each.dtype == "bfloat16" for each in found)


@pytest.mark.parametrize(
    ("is_unscaled", "max_norm", "num_events"),
    [(False, 1.0, 1), (True, 1.0, 0), (False, 1024.0, 0)],
    ids=["scaled", "unscaled before", "a bound that is scaled, too"],
)
def test_clipping_of_scaled_gradients(
    observed: Observed, is_unscaled: bool, max_norm: float, num_events: int
) -> None:
    observed.install("steps", "clipping")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        scaler.scale(model(torch.ones(2, 16)).sum()).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    found = observed.events(ClipMissed)
    assert len(found) == num_events
    assert all((each.scaler, each.optimizer) == ("GradScaler", "SGD") for each in found)


def clip_copies(model: nn.Module, _: list[nn.Parameter]) -> None:
    copies = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    for copy, each in zip(copies, model.parameters(), strict=True):
        copy.grad = each.grad
    torch.nn.utils.clip_grad_norm_(copies, 1.0)


def clip_earlier(_: nn.Module, earlier: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(earlier, 1.0)


def clip_gradients(model: nn.Module, _: list[nn.Parameter]) -> None:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(found)
    torch.nn.utils.clip_grads_with_norm_(found, 1.0, norm)


def clip_some(model: nn.Module, _: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1.0)


@pytest.mark.parametrize(
    ("clip", "num_events"),
    [(clip_copies, 1), (clip_earlier, 1), (clip_gradients, 1), (clip_some, 0)],
)
def test_clipping_of_what_no_optimizer_holds(
    observed: Observed,
    clip: Callable[[nn.Module, list[nn.Parameter]], None],
    num_events: int,
) -> None:
    observed.install("steps", "clipping")
    earlier, model = list(network().parameters()), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
        clip(model, earlier)
        optimizer.step()
    assert len(observed.events(ClipMissed)) == num_events


def test_clipping_may_be_compiled_as_a_whole(observed: Observed) -> None:
    observed.install("steps", "clipping")
    model = network()
    model(torch.ones(2, 16)).sum().backward()

    @torch.compile(backend="eager", fullgraph=True)
    def clip() -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert clip() > 1.0
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients) <= 1.0 + 1e-6


def test_an_optimizer_that_copies_gradients_in_its_step_clips_those_of_the_model(
    observed: Observed,
) -> None:
    observed.install("steps", "clipping")
    model = network().bfloat16()
    masters = [each.detach().float() for each in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 16).bfloat16()).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for master, each in zip(masters, model.parameters(), strict=True):
            assert each.grad is not None
            master.grad = each.grad.float()
        optimizer.step()
    assert not observed.events(ClipMissed)


class Rotary(nn.Module):
    """Angles of positions, as cosine and sine."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(8) / 8))

    def forward(self, length: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(length).float(), self.inv_freq.float())
        return angles.cos() + torch.sin(angles)


@pytest.mark.parametrize("is_cast", [True, False])
def test_angles_of_a_buffer_that_a_cast_has_rounded(observed: Observed, is_cast: bool) -> None:
    observed.install("buffer-casts")
    model = nn.Sequential(Rotary())
    exact = model[0].inv_freq.double()
    model.to(torch.bfloat16 if is_cast else torch.float64)
    for _ in range(5):
        model(100)
    for probe in observed.probes:
        probe.flush()
    found = observed.events(PositionsRounded)
    assert len(found) == (6 if is_cast else 0)  # two functions at three passes
    for each in found:
        assert each.buffer == "0.inv_freq"
        assert each.largest_angle == 99.0
        assert each.largest_error == float((exact - exact.bfloat16().double()).abs().max())
