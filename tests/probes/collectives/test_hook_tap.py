from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from distdiag.events.lifecycle import TorchLoaded
from distdiag.probes.collectives.functional import FunctionalTap
from distdiag.probes.collectives.hooks import HookTap
from distdiag.probes.collectives.python_wrappers import CollectiveWrappers
from distdiag.probes.collectives.work import WorkProbe
from tests.probes.conftest import Observed

pytestmark = [
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="needs the hooks of torch 2.14"
    ),
    pytest.mark.usefixtures("fake_group"),
]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def tapped(observed: Observed) -> Observed:
    recorder, signals = observed.recorder, observed.signals
    functional = FunctionalTap(recorder, signals.exchange_starting)
    tap = HookTap(recorder, functional, signals.collective_recorded, signals.exchange_known)
    works = WorkProbe(recorder, signals.work_waited)
    wrappers = CollectiveWrappers(
        recorder, tap, works, signals.tensors_shared, signals.exchange_starting
    )
    for probe in (functional, tap, works, wrappers):
        probe.install()
        observed.probes.append(probe)
    return observed


def test_the_way_of_observing_is_said(tapped):
    assert [event.tap for event in tapped.events(TorchLoaded)] == ["hooks"]


def test_eager_functional_and_message_calls_are_seen_with_their_arguments(tapped):
    dist.all_reduce(torch.ones(2, 3), op=dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(3), src=1)
    dist.send(torch.ones(5), dst=1)
    dist.all_gather_into_tensor(torch.ones(6), torch.ones(3))
    funcol.all_reduce(torch.ones(4), "min", dist.group.WORLD)
    seen = [
        (c.signature.op, c.signature.input_sizes, c.signature.reduce_op, c.collective_seq_id)
        for c in tapped.calls()
    ]
    assert seen == [
        ("all_reduce", ((2, 3),), "MAX", 1),
        ("broadcast", ((3,),), None, 2),
        ("send", ((5,),), None, -1),
        ("all_gather_into_tensor", ((3,),), None, 3),
        ("all_reduce", ((4,),), "MIN", 4),
    ]
    assert tapped.calls()[1].signature.root == 1
    assert tapped.calls()[2].signature.peer == 1


def test_a_group_made_later_is_observed_too(tapped):
    group = dist.new_group([0, 1], group_desc="late")
    dist.barrier(group=group)
    assert [call.group.desc for call in tapped.calls() if call.signature.op == "barrier"] == [
        "late"
    ]


def test_a_call_is_issued_and_waited(tapped):
    dist.all_reduce(torch.ones(2))
    (call,) = tapped.calls()
    assert tapped.states(call) == ["issued", "waited"]


def test_after_uninstalling_nothing_is_written(tapped):
    tapped.uninstall()
    dist.all_reduce(torch.ones(2))
    assert tapped.calls() == []
