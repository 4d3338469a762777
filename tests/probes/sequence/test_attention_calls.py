"""A call of attention that cannot be read is reported, and goes through as it would."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn import functional

from distdiag.events.sequences import AttentionUnread
from distdiag.probes.sequence import attention_calls
from tests.probes.conftest import Observed


def failing(*_: object) -> None:
    raise RuntimeError("no sizes")


def test_what_cannot_be_read_is_counted(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_calls, "_attention", failing)
    observed.install("sequence")
    query = torch.randn(1, 2, 4, 8)
    for _ in range(2):
        functional.scaled_dot_product_attention(query, query, query)
    reported = [(each.number, each.reason) for each in observed.events(AttentionUnread)]
    assert reported == [(1, "RuntimeError: no sizes"), (2, "RuntimeError: no sizes")]


def test_what_the_call_itself_refuses_is_not(observed: Observed) -> None:
    observed.install("sequence")
    query = torch.randn(4, 3, 8)
    with pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(query, query[0, 0], query)
    assert not observed.events(AttentionUnread)


def test_an_error_of_the_call_has_nothing_to_do_with_ours(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_calls, "_attention", failing)
    observed.install("sequence")
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError) as raised:
        functional.scaled_dot_product_attention(query, query[..., :3], query)
    assert raised.value.__context__ is None
    assert not observed.events(AttentionUnread)


def test_a_collective_of_no_tensors_is_no_exchange(observed: Observed) -> None:
    (probe,) = [each for each in observed.install("sequence") if each.name == "sequence"]
    assert observed.signals.exchange_starting.subscribers
    observed.signals.exchange_starting.emit("all_gather", [], None, -1, sys._getframe())
    assert not probe.is_off
