"""Trainings that are right give the numerics probe nothing to say, and notice nothing of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.numerics import NonFinite
from tests.probes.conftest import Observed

DIM, LENGTH, BATCH = 8, 6, 4


@pytest.fixture
def probe(observed: Observed, lone_group: None) -> Iterator[Observed]:
    observed.install("steps", "data", "sharded-forwards", "numerics")
    yield observed
    assert "numerics" not in [each.probe for each in observed.events(ProbeDisabled)]


def reported(observed):
    for each in observed.probes:
        each.flush()
    return [(e.step, e.outcome, e.places) for e in observed.events(NonFinite)]


class Attention(nn.Module):
    """Attention with a causal mask, and padding whose queries see nothing that counts."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.2)

    def forward(self, x, mask):
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / DIM**0.5 + mask
        return self.out(self.dropout(self.softmax(scores)) @ value)


class Model(nn.Module):
    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embed = nn.Embedding(10, DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, 10)
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            if self.is_checkpointed:
                x = x + checkpoint(layer, x, self.mask, use_reentrant=self.is_checkpointed == "old")
            else:
                x = x + layer(x, self.mask)
        return self.head(x)


def train(model, steps=3, scaler=None, dtype=None, loss_of=None):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 10, (BATCH, LENGTH))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(tokens)
            loss = (
                loss_of(logits)
                if loss_of
                else F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            )
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_checkpointed", [False, "new", "old"])
def test_attention_with_masks_of_minus_infinity_is_silent(probe, dtype, is_checkpointed):
    train(Model(is_checkpointed), dtype=dtype)

    assert reported(probe) == []


def test_a_gradient_scaler_that_finds_its_scale_is_silent(probe):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    train(Model(), scaler=scaler, dtype=torch.float16, steps=4)

    assert {outcome for _, outcome, _ in reported(probe)} <= {"", "skipped"}


def test_logits_of_minus_infinity_and_a_choice_of_the_best_are_silent(probe):
    def loss_of(logits):
        best = logits.topk(3, dim=-1).indices
        kept = torch.full_like(logits, -math.inf).scatter(-1, best, logits.gather(-1, best))
        return -kept.log_softmax(-1).gather(-1, best[..., :1]).mean()

    class Kept(Model):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return self.tail(logits.masked_fill(logits < logits.topk(3, -1).values[..., 2:], -100))

    model = Kept()
    model.tail = nn.LogSoftmax(dim=-1)
    train(model, loss_of=loss_of)

    assert reported(probe) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_parts_stay_whole_and_silent(probe):
    torch._dynamo.reset()
    model = Model()
    model.layers[0] = torch.compile(model.layers[0], backend="aot_eager", fullgraph=True)
    train(model)

    assert reported(probe) == []
    torch._dynamo.reset()


def test_a_step_that_is_compiled_stays_one_graph(probe):
    torch._dynamo.reset()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(tokens):
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    for _ in range(3):
        loss_of(torch.randint(0, 10, (BATCH, LENGTH))).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert reported(probe) == []
    torch._dynamo.reset()


def test_two_models_that_train_against_each_other_are_silent(probe):
    maker, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
    for step in range(4):
        made = maker(torch.randn(6, 4))
        loss = F.softplus(judge(made.detach())).mean() if step % 2 else -judge(made).mean()
        loss.backward()
        optimizers[step % 2].step()
        for each in optimizers:
            each.zero_grad()

    assert reported(probe) == []


def test_losses_and_random_states_are_the_same_to_the_last_bit(observed, lone_group):
    torch.manual_seed(0)
    model = Model(is_checkpointed="new")
    plain = train(copy.deepcopy(model))
    state = torch.get_rng_state()

    observed.install("steps", "data", "sharded-forwards", "numerics")
    watched = train(model)

    assert all(map(torch.equal, plain, watched))
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_is_read_in_a_way_that_waits_for_a_device(probe, monkeypatch):
    def refuse(self, *_, **__):
        raise AssertionError("this waits for a device")

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patched:
        for name in ("item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            patched.setattr(torch.Tensor, name, refuse)
        for _ in range(2):
            model(torch.zeros(BATCH, LENGTH, dtype=torch.int64)).square().mean().backward()
            optimizer.step()

    assert reported(probe) == []


def test_no_hook_is_left_on_modules_between_forward_passes(probe):
    model = Model()
    train(model, steps=2)

    parts = [part for part in model.modules() if part is not model]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    evaluated = copy.deepcopy(model).eval()
    with torch.no_grad():
        evaluated(torch.zeros(1, LENGTH, dtype=torch.int64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_a_gpu(probe):
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4):
            loss = model(tokens).square().mean() * (math.nan if step == 2 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    (step, _, places) = reported(probe)[0]
    assert (step, places[0].stage) == (2, "loss")
