"""What `to_empty` left in tensors, and which of them were written since."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distdiag.probes.base import Patches
from distdiag.probes.models.emptied import EmptiedTensors
from distdiag.probes.tensors.content import contents
from tests.probes.sample_models import ddp


@pytest.fixture
def emptied():
    patches, emptied, failures = Patches(), EmptiedTensors(), []
    emptied.watch(patches, failures.append)
    yield emptied
    patches.undo()
    assert failures == []


def fresh(monkeypatch: pytest.MonkeyPatch) -> nn.Linear:
    """A layer whose memory held plausible numbers before."""
    monkeypatch.setattr(torch, "empty_like", lambda each, device: torch.rand(each.shape))
    return nn.Linear(3, 3, device="meta").to_empty(device="cpu")


def test_what_was_left_is_known_by_its_digest(emptied, monkeypatch):
    layer = fresh(monkeypatch)
    expected = [each.digest for each in contents(list(layer.parameters())).take()]
    assert [emptied.digest(each) for each in layer.parameters()] == expected


def test_what_was_written_is_not_even_with_the_same_numbers(emptied, monkeypatch):
    layer = fresh(monkeypatch)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.clone())
        layer.bias = nn.Parameter(torch.zeros(3))
    assert [emptied.digest(each) for each in layer.parameters()] == ["", ""]


def test_other_tensors_are_not(emptied):
    assert emptied.digest(nn.Linear(3, 3).weight) == ""


@pytest.mark.usefixtures("fake_group")
def test_what_ddp_sends_round_stays_unwritten_on_its_source(emptied, monkeypatch):
    layer = fresh(monkeypatch)
    left = [emptied.digest(each) for each in layer.parameters()]
    nn.init.zeros_(layer.bias)

    ddp(layer)

    assert [emptied.digest(each) for each in layer.parameters()] == [left[0], ""]
