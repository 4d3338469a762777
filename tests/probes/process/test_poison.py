"""Memory that nobody has written, under ``--poison-empty``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from distdiag.record.recorder import Recorder
from tests.probes.conftest import Observed


@pytest.fixture
def poisoned(observed: Observed) -> Iterator[Recorder]:
    observed.install("steps", "poison-empty", poison_empty=True)
    yield observed.recorder
    observed.uninstall()


def step() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_what_is_reserved_holds_nan_until_the_first_step(poisoned: Recorder) -> None:
    layer = nn.Linear(3, 3, device="meta").to_empty(device="cpu")

    assert torch.empty(8).isnan().all()
    assert layer.weight.isnan().all()
    assert torch.zeros(8).eq(0).all()

    step()

    assert not torch.are_deterministic_algorithms_enabled()


def test_a_mode_that_the_script_chose_itself_stays(poisoned: Recorder) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        step()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_the_flag_nothing_changes(observed: Observed) -> None:
    observed.install()
    assert not torch.are_deterministic_algorithms_enabled()
