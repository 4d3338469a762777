"""The numerics probe names the module and the stage at which the first NaN or inf is made."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distdiag.events.numerics import NearOverflow, NonFinite
from tests.probes.conftest import Observed

NAN = float("nan")


class Poison(torch.autograd.Function):
    """Put one NaN into a tensor, or into its gradient."""

    @staticmethod
    def forward(ctx, tensor, in_backward):
        ctx.in_backward = in_backward
        return tensor.clone() if in_backward else poisoned(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return (poisoned(gradient) if ctx.in_backward else gradient), None


def poisoned(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[3] = NAN
    return tensor


class Block(nn.Module):
    """A residual block; `fault` poisons one place in it, as (where, in_backward)."""

    def __init__(self, dim=8):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.fault = None

    def forward(self, x):
        hidden = self.up(self.norm(x))
        hidden = F.gelu(self.at("gelu", hidden))
        return x + self.at("down", self.down(hidden))

    def at(self, where, tensor):
        if self.fault and self.fault[0] == where:
            return Poison.apply(tensor, self.fault[1])
        return tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def probe(observed: Observed, lone_group: None) -> Observed:
    observed.install("steps", "data", "sharded-forwards", "numerics")
    return observed


def train(observed, model, steps=3, change=lambda step: None, loss_of=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **options)
    torch.manual_seed(0)
    for step in range(steps):
        change(step)
        optimizer.zero_grad()
        output = model(torch.randn(5, 4))
        loss = output.square().mean() if loss_of is None else loss_of(output)
        loss.backward()
        optimizer.step()
    for each in observed.probes:
        each.flush()
    events = observed.events(NonFinite)
    return [each for each in events if each.outcome]


def first(events):
    place = events[0].places[0]
    return events[0].step, place.stage, place.module, place.value


def test_a_healthy_training_gives_nothing(probe):
    assert train(probe, Model()) == []
    assert probe.events(NearOverflow) == []


@pytest.mark.parametrize(
    ("where", "module", "step"),
    [
        ("gelu", "layers.1", 0),
        ("down", "layers.1", 0),
        ("gelu", "layers.1", 2),
        ("down", "layers.1", 31),
        ("gelu", "layers.1.down", 70),  # what is between modules is not read at most steps
    ],
)
def test_a_nan_of_the_forward_pass_is_found_where_it_is_made(probe, step, where, module):
    model = Model()

    def change(now):
        model.layers[1].fault = (where, False) if now == step else None

    events = train(probe, model, step + 2, change)

    assert first(events) == (step, "forward", module, "nan")
    assert events[0].outcome == "stepped"
    assert not events[0].is_loss_finite


def test_a_nan_of_the_output_of_a_leaf_names_the_leaf(probe):
    model = Model()
    inner = model.layers[2].up.forward
    model.layers[2].up.forward = lambda x: poisoned(inner(x))

    assert first(train(probe, model)) == (0, "forward", "layers.2.up", "nan")


@pytest.mark.parametrize("step", [0, 2])
def test_a_nan_of_the_backward_pass_is_found_where_it_is_made(probe, step):
    model = Model()

    def change(now):
        model.layers[1].fault = ("down", True) if now == step else None

    events = train(probe, model, step + 1, change)

    assert first(events) == (step, "backward", "layers.1", "nan")


def test_a_nan_in_a_block_that_is_read_as_a_whole_names_the_block(probe):
    model = Model()

    def change(now):
        model.layers[1].fault = ("down", True) if now == 40 else None

    assert first(train(probe, model, 41, change)) == (40, "backward", "layers.1", "nan")


def test_a_gradient_of_a_parameter_is_told_from_that_of_an_activation(probe):
    model = Model()
    model.layers[0].down.weight.register_hook(lambda gradient: poisoned(gradient))

    step, stage, module, _ = first(train(probe, model))

    assert (step, stage, module) == (0, "weight-gradient", "layers.0.down")


def test_an_update_that_divides_by_zero_is_found(probe):
    model = Model()

    def change(step):
        if step == 1:
            probe_optimizer = torch.optim.SGD(model.head.parameters(), lr=NAN)
            model.head(torch.randn(2, 8)).sum().backward()
            probe_optimizer.step()

    events = train(probe, model, 3, change)

    assert first(events)[1:] == ("update", "head", "nan")


def test_a_loss_outside_of_all_modules_is_found(probe):
    events = train(probe, Model(), loss_of=lambda output: (output - output).mean().log())

    assert first(events)[:3] == (0, "loss", "")


def test_a_nan_in_the_input_and_in_a_parameter(probe):
    model = Model()
    with torch.no_grad():
        model.layers[1].norm.weight[2] = math.inf
    place = train(probe, model)[0].places[0]

    assert (place.stage, place.module, place.what) == ("parameter", "layers.1.norm", "its weight")


def test_minus_infinity_in_masks_is_normal(probe):
    class Masked(Model):
        def forward(self, x):
            scores = self.head(self.embed(x)).masked_fill(torch.tensor([True, False]), -math.inf)
            return self.tail(scores)

    model = Masked()
    model.tail = nn.Softmax(dim=-1)

    assert train(probe, model) == []


def test_a_nan_that_nan_to_num_hides_is_told_with_the_operation(probe):
    class Hidden(Model):
        def forward(self, x):
            hidden = self.embed(x)
            return self.head(torch.nan_to_num(self.bad(hidden)))

    model = Hidden()
    model.bad = nn.Identity()
    model.bad.forward = lambda x: poisoned(x)
    events = train(probe, model)

    assert {each.outcome for each in events} == {"masked"}
    assert events[-1].places[0].hidden_by == "nan_to_num"
    assert first(events) == (0, "forward", "bad", "nan")


def test_a_pass_that_the_program_leaves_out_is_dropped(probe):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        model.layers[1].fault = ("down", False) if step == 1 else None
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).mean()
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
    probe.probes[-1].flush()

    outcomes = {each.outcome for each in probe.events(NonFinite)}
    assert outcomes == {"", "dropped"}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_the_program_drops_before_its_step_are_dropped(probe, set_to_none):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        model.layers[1].fault = ("down", False) if step == 1 else None
        loss = model(torch.randn(5, 4)).mean()
        loss.backward()
        if not torch.isfinite(loss):
            optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        optimizer.zero_grad()
    probe.probes[-1].flush()

    assert {each.outcome for each in probe.events(NonFinite)} == {"", "dropped"}


def test_a_step_that_a_gradient_scaler_skips_is_told_as_such(probe):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    for _ in range(3):
        optimizer.zero_grad()
        loss = 1e4 * (model(torch.randn(5, 4)).square().mean() + 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    probe.probes[-1].flush()

    events = probe.events(NonFinite)
    assert {each.outcome for each in events if each.step == 0} <= {"", "skipped"}


def test_half_precision_near_its_limit_is_told_once(probe):
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float16))
    with torch.no_grad():
        model[0].weight.fill_(10000.0)
        model[0].bias.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        model(torch.full((2, 4), 0.5 + step / 2, dtype=torch.float16)).mean().backward()
        optimizer.step()
    probe.probes[-1].flush()

    (event,) = probe.events(NearOverflow)
    assert (event.step, event.dtype, event.earlier_step) == (1, "float16", 0)
    assert event.largest > event.limit / 2
