"""When ``--verify-sequence`` runs a program's functions, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from distdiag.config.subjects import SequenceConfig
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.sequences import TokenTrace
from distdiag.record import marks as sequence_marks
from tests.probes.conftest import Observed

NAMED = SequenceConfig(split=(f"{__name__}:split",), gather=(f"{__name__}:gather",), length=4)


def split(x: torch.Tensor) -> torch.Tensor:
    return x


def gather(part: torch.Tensor) -> torch.Tensor:
    return part * 1 + 0 * torch.rand(())


def broken(part: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not here")


@pytest.fixture
def verifying(observed: Observed) -> Callable[[SequenceConfig], Observed]:
    def install(config: SequenceConfig) -> Observed:
        observed.install("steps", "verify-sequence", verify_sequence=True, sequence=config)
        return observed

    return install


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> dict[object, object]:
    monkeypatch.setattr("distdiag.probes.sequence.verify.MARKED", {})
    monkeypatch.setattr(sequence_marks, "MARKED", {})
    return sequence_marks.MARKED  # type: ignore[return-value]


def train(num_steps: int = 2) -> float:
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        layer(torch.rand(3, 2)).sum().backward()
        optimizer.step()
    return float(layer.weight.detach().sum())


def test_it_runs_once_before_the_first_backward_pass(verifying) -> None:
    observed = verifying(NAMED)
    train()
    (trace,) = observed.events(TokenTrace)
    assert trace.gathered == trace.parts == tuple(range(8))
    assert trace.scales == (1.0,) * 8
    assert trace.members == (0,)
    assert (trace.step, trace.number) == (0, 0)
    assert dict(trace.functions)["gather"].function == "gather"
    assert observed.recorder.num_backwards == 2


def test_the_training_goes_as_it_would(verifying) -> None:
    expected = train()
    observed = verifying(NAMED)
    subscribers = observed.signals.tensors_shared.subscribers
    assert train() == expected
    assert observed.signals.tensors_shared.subscribers == subscribers != ()


def test_what_a_function_raises_is_written_down_and_harms_nobody(verifying) -> None:
    observed = verifying(
        SequenceConfig(split=(f"{__name__}:split",), gather=(f"{__name__}:broken",), length=4)
    )
    train()
    (trace,) = observed.events(TokenTrace)
    assert (trace.stage, trace.error) == ("gather", "RuntimeError: not here")
    assert not observed.events(ProbeDisabled)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SequenceConfig(), "no function is named"),
        (SequenceConfig(split=("a.b:c",), gather=("a.b:c",)), "No module named 'a'"),
        (SequenceConfig(split=(f"{__name__}:NAMED",), gather=("a:b",)), "is no function"),
    ],
)
def test_what_cannot_be_verified_is_said(verifying, marks, config, words) -> None:
    observed = verifying(config)
    train()
    (disabled,) = observed.events(ProbeDisabled)
    assert disabled.probe == "verify-sequence"
    assert words in disabled.reason


def test_marked_functions_are_paired_by_name(observed: Observed, marks, monkeypatch) -> None:
    monkeypatch.setattr("distdiag.probes.sequence.verify.MARKED", marks)
    sequence_marks.splits_sequence(dim=1, name="a")(split)
    sequence_marks.gathers_sequence(dim=1, name="a")(gather)
    sequence_marks.splits_sequence(dim=1, name="b")(split)
    config = SequenceConfig(length=4)
    observed.install("steps", "verify-sequence", verify_sequence=True, sequence=config)
    train()
    (trace,) = observed.events(TokenTrace)
    assert trace.name == f"{__name__}:split, {__name__}:gather"
