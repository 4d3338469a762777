from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.probes.patching.in_place import as_it_was
from tests.probes.conftest import Observed


def alone(method: Callable[..., Any], *args: Any) -> None:
    """Call a method of C++ on a thread on which nothing of Python runs."""
    _thread.start_new_thread(method, args)


def wait_until(is_done: Callable[[], object], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("group", ["fake_group", "lone_group"])
def test_a_call_from_a_thread_without_python_is_recorded(
    group: str, observed: Observed, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(group)
    probes = {probe.name: probe for probe in observed.install("collectives")}
    probes["collectives"].engage()
    unpatched = as_it_was(dist.ProcessGroup.allreduce)

    alone(unpatched, dist.group.WORLD, [torch.ones(3)])
    wait_until(lambda: [s for call in observed.calls() for s in observed.states(call)])

    assert not observed.events(ProbeDisabled)
    (call,) = observed.calls()
    assert (call.signature.op, call.signature.input_sizes) == ("all_reduce", ((3,),))
    assert call.site.frames == ()
    assert call.thread is not None
    assert observed.states(call)[0] == "issued"

    dist.all_reduce(torch.ones(2))  # and those of Python are recorded as ever, once

    assert [c.collective_seq_id for c in observed.calls()] == [1, 2]
