"""Exceptions that end a pass, and are caught by the program."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distdiag.events.lifecycle import BrokenPass
from tests.probes.conftest import Observed


class Failing(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            raise ValueError("a file is missing")
        return torch.zeros(2)


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("a hook has failed")


def test_what_ends_a_backward_pass_is_told_with_its_line(observed: Observed) -> None:
    observed.install("steps", "broken-passes")
    weight = torch.ones(2, requires_grad=True)
    for is_failing in (False, True, False):
        product = weight * 2
        if is_failing:
            product.register_hook(fail)
        with contextlib.suppress(RuntimeError):
            product.sum().backward()
    (found,) = observed.events(BrokenPass)
    assert (found.what, found.type) == ("backward pass", "RuntimeError")
    assert found.message == "a hook has failed"
    assert found.frames[0].function == "fail"
    assert found.site.location is not None
    assert found.site.location.file == __file__


def test_what_ends_a_fetch_is_told_and_the_end_of_the_data_is_not(observed: Observed) -> None:
    observed.install("broken-passes")
    with pytest.raises(ValueError, match="missing"):
        list(DataLoader(Failing()))
    list(DataLoader([torch.zeros(2)]))  # type: ignore[arg-type]
    (found,) = observed.events(BrokenPass)
    assert (found.what, found.type) == ("fetch of a batch", "ValueError")
    assert found.frames[0].function == "__getitem__"


def test_a_forward_pass_that_never_ended_is_told_when_the_next_begins(observed: Observed) -> None:
    observed.install("broken-passes")
    signals, model, inner = observed.signals, nn.Linear(2, 2), nn.Linear(2, 2)
    for ends in (True, False, True):
        signals.forward_started.emit(model, model, None)
        signals.forward_started.emit(inner, inner, None)
        signals.forward_ended.emit(inner, None)
        if ends:
            signals.forward_ended.emit(model, None)
    (found,) = observed.events(BrokenPass)
    assert (found.what, found.type) == ("forward pass", "")
