from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.losses import LossPass, LossWeights
from distdiag.probes.losses import probe as loss_probe
from distdiag.probes.losses.probe import averaging_in
from tests.probes.conftest import Observed
from tests.probes.sample_models import ddp

pytestmark = pytest.mark.usefixtures("fake_group")

ROWS, LENGTH, VOCAB = 2, 6, 5
IGNORED = -100
LABELS = torch.tensor([[1, 2, 3, 4, 0, 1], [IGNORED, IGNORED, IGNORED, 2, 1, 0]])
MASK = LABELS != IGNORED
NUM = 9


@pytest.fixture(autouse=True)
def installed(observed: Observed) -> Iterator[None]:
    observed.install("steps")
    yield
    assert not observed.events(ProbeDisabled)


def scores(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, ROWS * LENGTH * 3).reshape(ROWS, LENGTH, 3))


def flat(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.reshape(-1, VOCAB), LABELS.reshape(-1)


def none(logits: Tensor) -> Tensor:
    return F.cross_entropy(*flat(logits), reduction="none").view(ROWS, LENGTH)


def gathered(logits: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def passes(observed: Observed, *losses: Callable[[Tensor], Tensor]) -> tuple[LossPass | None, ...]:
    """What was read of the passes of one step."""
    model = nn.Linear(3, VOCAB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        loss(scores(model)).backward()
    optimizer.step()
    (event,) = observed.events(LossWeights)
    assert event.site.location is not None
    assert event.site.location.function == "passes"
    return event.passes


READ = {
    "mean": (lambda x: F.cross_entropy(*flat(x)), 1 / NUM),
    "mean by steps": (lambda x: F.cross_entropy(*flat(x)) / 4, 1 / NUM / 4),
    "mean times": (lambda x: 3 * F.cross_entropy(*flat(x)) + x.norm(), 3 / NUM),
    "sum": (lambda x: F.cross_entropy(*flat(x), reduction="sum"), 1.0),
    "sum by a tensor": (lambda x: F.cross_entropy(*flat(x), reduction="sum") / MASK.sum(), 1 / NUM),
    "two dimensions": (lambda x: F.cross_entropy(x.transpose(1, 2), LABELS), 1 / NUM),
    "none, masked": (lambda x: (none(x) * MASK).sum() / MASK.sum(), 1 / NUM),
    "none, summed by rows": (lambda x: (none(x) * MASK).sum(1).sum() / 20, 1 / 20),
    "none, all": (lambda x: none(x).mean(), 1 / 12),
    "none, selected": (lambda x: none(x)[MASK].mean(), 1 / NUM),
    "masked": (lambda x: (gathered(x) * MASK).sum() / MASK.sum(), 1 / NUM),
    "masked before": (lambda x: (gathered(x) / 20 * MASK).sum(), 1 / 20),
    "masked mean": (lambda x: (gathered(x) * MASK.float()).mean(), 1 / 12),
    "indexed": (lambda x: gathered(x)[MASK].mean(), 1 / NUM),
    "selected": (lambda x: gathered(x).masked_select(MASK).mean(), 1 / NUM),
    "filled": (lambda x: gathered(x).masked_fill(~MASK, 0.0).sum() / 7, 1 / 7),
    "where": (lambda x: torch.where(MASK, gathered(x), 0.0).sum() / 7, 1 / 7),
    "where not": (lambda x: torch.where(~MASK, 0.0, gathered(x)).sum() / 7, 1 / 7),
}


@pytest.mark.parametrize("name", READ)
def test_what_each_token_weighs_is_read(name: str, observed: Observed) -> None:
    loss, weight = READ[name]
    (found,) = passes(observed, loss)
    assert found is not None
    assert found.weight == pytest.approx(weight, rel=1e-5)
    assert (found.num_counted, found.num_elements, found.num_rows) == (NUM, 12, ROWS)


def test_factors_are_reported_from_the_root_on(observed: Observed) -> None:
    (found,) = passes(
        observed, lambda x: (F.cross_entropy(*flat(x), reduction="sum") / 8 + x.norm()) / 4 * 2
    )
    assert found is not None
    reported = [(each.op, each.value, each.num_terms) for each in found.factors]
    assert reported == [("*", 2.0, 1), ("/", 4.0, 2), ("/", 8.0, 1)]


def test_losses_without_tokens_are_reported_as_such(observed: Observed) -> None:
    found = passes(
        observed,
        lambda x: F.mse_loss(x, torch.zeros_like(x)) / 2,
        lambda x: x.square().mean(),
        lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="sum"),
    )
    assert [each and each.kind for each in found] == ["dense"] * 3
    assert [each and each.mass for each in found] == pytest.approx([0.5, 1.0, 60.0])


def test_a_loss_in_pieces_is_taken_together(observed: Observed) -> None:
    def pieces(logits: Tensor) -> Tensor:
        pairs = zip(logits, LABELS, strict=True)
        parts = [F.cross_entropy(x, y, reduction="sum") for x, y in pairs]
        return sum(parts) / NUM  # type: ignore[return-value]

    (found,) = passes(observed, pieces)
    assert found is not None
    assert (found.num_counted, found.num_elements) == (NUM, 12)
    assert found.weight == pytest.approx(1 / NUM)


@pytest.mark.parametrize("name", READ)
def test_numbers_that_a_device_still_computes_are_read_later(
    name: str, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("graph", "terms", "reading"):
        reads = f"distdiag.probes.losses.{module}.number"
        monkeypatch.setattr(reads, lambda x: x.double().reshape(()))
    loss, weight = READ[name]
    (found,) = passes(observed, loss)
    assert found is not None
    assert found.weight == pytest.approx(weight, rel=1e-5)
    assert found.num_counted == NUM
    assert all(isinstance(factor.value, float) for factor in found.factors)


UNREAD = {
    "class weights": lambda x: F.cross_entropy(*flat(x), weight=torch.arange(1.0, 6.0)),
    "token weights": lambda x: (gathered(x) * torch.arange(12.0).view(ROWS, LENGTH)).sum(),
    "mean of each row": lambda x: ((none(x) * MASK).sum(1) / MASK.sum(1)).mean(),
    "mean of the only row": lambda x: ((none(x)[1:] * MASK[1:]).sum(1) / MASK[1:].sum(1)).mean(),
    "means of rows": lambda x: torch.stack(list(map(F.cross_entropy, x, LABELS))).mean(),
    "two masks": lambda x: (gathered(x) * MASK * MASK.float()).sum(),
    "product": lambda x: F.cross_entropy(*flat(x)) * x.norm(),
    "checkpoint": lambda x: checkpoint(lambda y: F.cross_entropy(*flat(y)), x, use_reentrant=False),
    "no loss": lambda x: x.norm(),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_clear_is_left_alone(name: str, observed: Observed) -> None:
    assert passes(observed, UNREAD[name]) == (None,)


def test_a_rank_without_a_token_is_reported(observed: Observed) -> None:
    nothing = torch.full((12,), IGNORED)
    (found,) = passes(observed, lambda x: F.cross_entropy(x.reshape(-1, VOCAB), nothing))
    assert found is not None
    assert (found.num_counted, found.weight) == (0, 0.0)


def test_scaling_is_in_the_weight(observed: Observed) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (found,) = passes(observed, lambda x: scaler.scale(F.cross_entropy(*flat(x))))
    assert found is not None
    assert found.weight == pytest.approx(1024 / NUM)


# Side effects


def gradients(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Linear(3, VOCAB)
    out = scores(model)
    out.retain_grad()
    loss(out).backward()
    assert out.grad is not None and model.weight.grad is not None
    return out.grad, model.weight.grad


@pytest.mark.parametrize("name", READ)
def test_gradients_are_bit_identical(name: str, observed: Observed) -> None:
    loss, _ = READ[name]
    seen, state = gradients(loss), torch.get_rng_state()
    observed.uninstall()
    plain = gradients(loss)
    assert all(torch.equal(one, other) for one, other in zip(seen, plain, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_that_is_kept_has_no_hooks_left(observed: Observed) -> None:
    model = nn.Linear(3, VOCAB)
    loss = F.cross_entropy(*flat(scores(model)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    (event,) = observed.events(LossWeights)
    assert [each and each.num_counted for each in event.passes] == [NUM, NUM]
    assert model.weight.grad is not None


def test_a_pass_that_raises_leaves_nothing_behind(observed: Observed) -> None:
    model = nn.Linear(3, VOCAB)
    out = scores(model)
    handle = out.register_hook(lambda _: 1 / 0)
    loss = F.cross_entropy(*flat(out))
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    (probe,) = [p for p in observed.probes if isinstance(p, loss_probe.LossProbe)]
    assert probe._running is None
    loss.backward()


def test_a_failure_of_ours_never_reaches_the_script(
    observed: Observed, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    failures: list[Exception] = []
    (probe,) = [p for p in observed.probes if isinstance(p, loss_probe.LossProbe)]
    monkeypatch.setattr(probe, "fail", failures.append)
    monkeypatch.setattr("distdiag.probes.losses.reading._read", lambda *_: 1 / 0)
    loss = F.cross_entropy(*flat(scores(nn.Linear(3, VOCAB))))
    loss.backward()
    assert [type(each) for each in failures] == [ZeroDivisionError]


def test_only_steps_that_are_due_are_read(observed: Observed) -> None:
    model = nn.Linear(3, VOCAB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(102):
        F.cross_entropy(*flat(scores(model))).backward()
        optimizer.step()
    due = [0, 1, 2, 4, 8, 16, 32, 64, 100]
    assert [event.step for event in observed.events(LossWeights)] == due


def test_a_compiled_loss_keeps_its_graph_whole(observed: Observed) -> None:
    model = nn.Linear(3, VOCAB)
    compiled = torch.compile(
        lambda x: F.cross_entropy(*flat(model(x))), backend="aot_eager", fullgraph=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled(torch.ones(ROWS, LENGTH, 3)).backward()
    optimizer.step()
    (event,) = observed.events(LossWeights)
    assert event.passes == (None,)


# Who averages


def test_what_ddp_divides_by() -> None:
    model = DistributedDataParallel(nn.Linear(3, VOCAB))
    assert averaging_in(model) == ((0, 1), 2.0)
    assert averaging_in(ddp(nn.Linear(3, VOCAB))) == ((0, 1), 0.0)  # a hook may do anything


def test_what_fsdp2_divides_by() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, VOCAB))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    assert averaging_in(model) == ((0, 1), 2.0)
    for part in (*model, model):
        part.set_gradient_divide_factor(1.0)
    assert averaging_in(model) == ((0, 1), 1.0)


def test_nobody_is_known_to_average_a_plain_model(observed: Observed) -> None:
    assert averaging_in(nn.Linear(3, VOCAB)) == ((), 0.0)
    passes(observed, lambda x: F.cross_entropy(*flat(x)))
    (event,) = observed.events(LossWeights)
    assert (event.members, event.divisor) == ((), 0.0)


def test_nothing_is_read_on_a_rank_of_its_own(observed: Observed) -> None:
    dist.destroy_process_group()
    model = nn.Linear(3, VOCAB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = F.cross_entropy(*flat(scores(model)))
    loss.backward()
    optimizer.step()
    assert not observed.events(LossWeights)
    assert math.isfinite(loss.item())


class Scorer(nn.Module):
    """Scores each label but the first of a sequence, a few tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 3), nn.Linear(3, VOCAB)

    def forward(self, labels: Tensor, masked: bool = False) -> Tensor:
        hidden = self.embed(labels.clamp(min=0))[:, :-1]
        if masked:
            logs = self.head(hidden).log_softmax(-1)
            chosen = logs.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return -(chosen * (labels[:, 1:] != IGNORED)).sum() / 7
        total = torch.zeros(())
        hidden, targets = hidden.flatten(0, 1), labels[:, 1:].flatten()
        for some, target in zip(hidden.split(4), targets.split(4), strict=True):
            total = total + F.cross_entropy(self.head(some), target, reduction="sum")
        return total / 7


@pytest.mark.parametrize("masked", [False, True])
def test_first_labels_that_a_shift_leaves_out_are_counted(observed: Observed, masked: bool) -> None:
    observed.install("data")
    model = ddp(Scorer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    some = torch.tensor([[1, 2, 3, 4, 2, 1], [IGNORED, IGNORED, IGNORED, 2, 1, 3]])
    whole = torch.ones_like(some)
    for labels in (some, whole, some):
        model(labels, masked).backward()
    optimizer.step()

    (event,) = observed.events(LossWeights)
    assert [each and each.num_counted for each in event.passes] == [8, 10, 8]
    assert [each and each.num_first for each in event.passes] == [1, 2, 1]


def test_labels_that_were_not_seen_or_were_shifted_before_tell_nothing(observed: Observed) -> None:
    found = passes(observed, lambda x: F.cross_entropy(*flat(x)))
    assert [each and each.num_first for each in found] == [-1]


@pytest.mark.parametrize(("part", "first"), [(0, 1), (1, 2)])
def test_labels_that_a_loss_shifts_in_one_part_of_what_was_given_are_known(
    observed: Observed, part: int, first: int
) -> None:
    observed.signals.inputs_seen.emit(LABELS)
    logits, labels = slice(3 * part, 3 * part + 3), LABELS.chunk(2, 1)[part]

    def shifted(x: Tensor) -> Tensor:
        x = x[:, logits][:, :-1]
        return F.cross_entropy(x.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))

    def padded(x: Tensor) -> Tensor:
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return F.cross_entropy(x[:, logits].reshape(-1, VOCAB), targets.reshape(-1))

    found = passes(observed, shifted, padded)
    assert [each and (each.num_first, each.num_shifted) for each in found] == [(first, 4)] * 2


def test_labels_that_were_shifted_before_the_split_are_no_shifted_part(
    observed: Observed,
) -> None:
    observed.signals.inputs_seen.emit(LABELS)
    labels = F.pad(LABELS, (0, 1), value=IGNORED)[:, 1:4]
    (found,) = passes(
        observed, lambda x: F.cross_entropy(x[:, :3].reshape(-1, VOCAB), labels.reshape(-1))
    )
    assert found is not None
    assert found.num_first == -1
