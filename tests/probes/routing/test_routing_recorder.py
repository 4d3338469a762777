from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distdiag.config.tasks import RoutingTask
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.parity.routing.recordings import Recording
from distdiag.probes.routing.recorder import RoutingRecorder
from distdiag.record.recording import RouteRecord, Seen
from tests.probes.conftest import Observed

pytestmark = pytest.mark.usefixtures("fake_group")


class Layer(nn.Module):
    """Four experts; the two best ones get each token."""

    def __init__(self, jitter: float = 0.0) -> None:
        super().__init__()
        self.jitter = jitter
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.gate(tokens)
        if self.jitter:
            scores = scores + self.jitter * torch.randn_like(scores)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        parts = torch.stack([expert(tokens) for expert in self.experts], 1)
        picked = parts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return (picked * weights.unsqueeze(-1)).sum(1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, *, tokens: Tensor) -> Tensor:
        return checkpoint(self.layer, tokens, use_reentrant=False)


class Failing(Layer):
    def forward(self, tokens: Tensor) -> Tensor:
        raise ValueError("of the user's own")


def recording(observed: Observed, folder: Path, seed: int | None = None) -> RoutingRecorder:
    task = RoutingTask(folder=str(folder), num_steps=9, seed=seed)
    probe = RoutingRecorder(observed.recorder, task)
    probe.install()
    observed.probes.append(probe)
    return probe


def train(model: nn.Module, num_steps: int, **given: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(num_steps):
        torch.manual_seed(1)
        loss = model(**given).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def records(probe: RoutingRecorder, observed: Observed, folder: Path) -> list[RouteRecord]:
    probe.flush()
    assert not observed.events(ProbeDisabled)
    return list(Recording(folder).records[0])


def test_a_choice_is_recorded_whole_with_what_led_to_it(observed: Observed, tmp_path: Path) -> None:
    probe = recording(observed, tmp_path)
    model = nn.Sequential(Layer())
    tokens = torch.randn(5, 4)
    train(model, 1, input=tokens)
    found = records(probe, observed, tmp_path)
    kinds = [record.seen for record in found]
    assert kinds[:4] == [Seen.RANDOM, Seen.WEIGHTS, Seen.OUTPUT, Seen.CHOICE]
    assert kinds[-1] is Seen.GRADIENT
    choice = found[3]
    assert (choice.name, choice.step, choice.micro) == ("Sequential/0", 0, 0)
    whole = Recording(tmp_path).choices(0, choice)
    assert whole.indices.shape == (5, 2)
    assert (whole.inner >= whole.outer).all() and (whole.size >= whole.inner).all()
    outputs = [record.name for record in found if record.seen is Seen.OUTPUT]
    assert outputs[0] == "Sequential/0.gate" and outputs[-1] == "Sequential/"
    assert len(found[len(outputs) + 2].rows) == 5  # the model, with a digest of each sample


def test_repeated_passes_that_end_early_are_reported_apart_and_steps_go_on(
    observed: Observed, tmp_path: Path
) -> None:
    probe = recording(observed, tmp_path)
    train(Checkpointed(), 2, tokens=torch.randn(5, 4, requires_grad=True))
    choices = [r for r in records(probe, observed, tmp_path) if r.seen is Seen.CHOICE]
    assert [(each.step, each.micro, each.is_recompute) for each in choices] == [
        (0, 0, False),
        (0, 0, True),
        (1, 0, False),
        (1, 0, True),
    ]
    assert choices[0].digests == choices[1].digests
    assert Recording(tmp_path).num_steps == 2


def test_draws_and_what_the_options_say_of_them_are_reported(
    observed: Observed, tmp_path: Path
) -> None:
    probe = recording(observed, tmp_path)
    train(Layer(jitter=0.1), 1, tokens=torch.randn(5, 4))
    (choice,) = (r for r in records(probe, observed, tmp_path) if r.seen is Seen.CHOICE)
    assert choice.is_drawn and choice.is_meant_random


def test_the_run_stays_what_it_is(observed: Observed, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Layer(jitter=0.1), torch.randn(5, 4)
    plain = train(model, 3, tokens=tokens)
    torch.manual_seed(0)
    recording(observed, tmp_path)
    model, tokens = Layer(jitter=0.1), torch.randn(5, 4)
    assert all(map(torch.equal, plain, train(model, 3, tokens=tokens)))


def test_an_exception_of_the_user_passes_and_leaves_nothing_behind(
    observed: Observed, tmp_path: Path
) -> None:
    probe = recording(observed, tmp_path)
    with pytest.raises(ValueError, match="of the user's own"):
        nn.Sequential(Failing())(torch.randn(5, 4))
    assert torch._C._len_torch_function_stack() == 0
    train(Layer(), 1, tokens=torch.randn(5, 4))
    assert Seen.CHOICE in [record.seen for record in records(probe, observed, tmp_path)]


def test_a_seed_makes_what_is_drawn_the_same(observed: Observed, tmp_path: Path) -> None:
    recording(observed, tmp_path / "a", seed=5)
    first = torch.randn(3)
    recording(observed, tmp_path / "b", seed=5)
    assert torch.equal(first, torch.randn(3))
