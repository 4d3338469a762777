"""Whether the reducer of DDP worked, known from the times that it keeps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.probes.models.own_steps import IdleReducers

pytestmark = pytest.mark.usefixtures("lone_group")

BATCH = torch.ones(2, 4)


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 1), **options)


def marked(model: DistributedDataParallel) -> IdleReducers:
    reducers = IdleReducers()
    reducers.mark([model])
    return reducers


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_pass_through_the_wrapper_works(options: dict[str, bool]) -> None:
    model = wrapped(**options)
    reducers = marked(model)
    for _ in range(3):
        model(BATCH).sum().backward()
        assert not reducers.has_idle([model])
        reducers.mark([model])


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_pass_past_the_wrapper_does_not(num_before: int) -> None:
    model = wrapped()
    for _ in range(num_before):
        model(BATCH).sum().backward()
    model.zero_grad()
    reducers = marked(model)
    assert not reducers.has_idle([model])  # there is nothing to reduce
    model.module(BATCH).sum().backward()
    assert reducers.has_idle([model])


@pytest.mark.parametrize("syncs", [[False, True], [True, False]])
def test_one_pass_through_the_wrapper_is_enough(syncs: list[bool]) -> None:
    model = wrapped()
    reducers = marked(model)
    for sync in syncs:
        with nullcontext() if sync else model.no_sync():
            model(BATCH).sum().backward()
    assert not reducers.has_idle([model])


def test_of_the_first_pass_of_a_static_graph_nothing_is_known() -> None:
    model = wrapped(static_graph=True)
    reducers = marked(model)
    model(BATCH).sum().backward()
    assert not reducers.has_idle([model])


def test_what_was_not_marked_is_not_idle() -> None:
    model = wrapped()
    model.module(BATCH).sum().backward()
    assert not IdleReducers().has_idle([model])
