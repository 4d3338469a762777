from __future__ import annotations

import gc
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.distributed_c10d import _coalescing_manager

from distdiag.events.collectives import BufferChanged, CollectiveState
from tests.probes.conftest import Observed

PARTS = ("collectives",)


def test_a_synchronous_collective_is_waited_for(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)

    dist.all_reduce(torch.ones(1))
    dist.barrier()

    assert [observed.states(call) for call in observed.calls()] == [["issued", "waited"]] * 2


def test_waiting_is_recorded_when_the_user_waits(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)

    work = dist.all_reduce(torch.ones(1), async_op=True)
    (call,) = observed.calls()
    assert call.is_async
    assert observed.states(call) == ["issued"]

    work.wait()
    work.wait()
    del work
    assert observed.states(call) == ["issued", "waited"]


def test_a_work_that_nobody_looked_at_is_dropped(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)

    work = dist.all_reduce(torch.ones(1), async_op=True)
    del work
    gc.collect()

    (call,) = observed.calls()
    assert observed.states(call) == ["issued", "dropped"]


def test_polling_until_completion_is_completion_and_no_drop(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*PARTS)

    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        pass
    del work

    (call,) = observed.calls()
    assert observed.states(call) == ["issued", "completed"]


def test_taking_the_future_is_no_drop(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)

    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

    (call,) = observed.calls()
    assert observed.states(call) == ["issued"]


def test_a_work_that_torch_itself_dropped_is_its_own_affair(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*PARTS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))

    # Under `Join` DDP tells its peers that it goes on, and does not wait for the answer.
    with Join([model]):
        model(torch.ones(1, 1)).sum().backward()

    states = [state.state for state in observed.events(CollectiveState)]
    assert "issued" in states
    assert "dropped" not in states


def test_a_coalesced_block_is_one_call_that_its_manager_waits_for(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*PARTS)

    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(2))
    manager.wait()

    (call,) = observed.calls()
    assert call.signature.op == "all_reduce_coalesced"
    assert observed.states(call) == ["issued", "waited"]


def test_neither_work_nor_tensor_lives_longer(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)
    tensor = torch.ones(1)
    reference = weakref.ref(tensor)

    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    handle = weakref.ref(work)
    del work, tensor

    assert handle() is None
    deadline = time.monotonic() + 5  # the thread of gloo may hold it a moment longer
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None


def test_nothing_is_written_after_the_end(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)
    work = dist.all_reduce(torch.ones(1), async_op=True)

    observed.recorder.close()
    del work
    dist.all_reduce(torch.ones(1))

    (call,) = observed.calls()
    assert observed.states(call) == ["issued"]


def _changes(observed: Observed) -> list[BufferChanged]:
    return [event for event in observed.events() if isinstance(event, BufferChanged)]


def test_a_tensor_that_is_changed_before_the_wait_is_recorded(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*PARTS)

    buffer = torch.ones(4)
    work = dist.all_reduce(buffer, async_op=True)
    buffer.mul_(2)
    buffer.add_(1)
    work.wait()

    (call,) = observed.calls()
    (change,) = _changes(observed)
    assert (change.call, change.num_changes, change.device) == (call.seq, 2, "cpu")
    assert change.site.frames[0].file == __file__


def test_a_tensor_that_is_changed_after_the_wait_is_silent(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*PARTS)

    buffer, gathered = torch.ones(4), torch.zeros(4)
    work = dist.all_gather([gathered], buffer, async_op=True)
    work.wait()
    buffer.zero_()
    work.wait()

    assert not _changes(observed)


def test_what_another_wait_may_have_ended_is_not_judged(
    observed: Observed, lone_group: None
) -> None:
    observed.install(*PARTS)

    buffer = torch.ones(4)
    work = dist.all_reduce(buffer, async_op=True)
    dist.barrier()
    buffer.zero_()
    work.wait()
    work = dist.all_reduce(buffer, async_op=True)
    while not work.is_completed():
        pass
    buffer.zero_()
    work.wait()

    assert not _changes(observed)


def test_the_rest_of_a_storage_may_be_changed(observed: Observed, lone_group: None) -> None:
    observed.install(*PARTS)

    buffer = torch.ones(8)
    work = dist.all_reduce(buffer[:4], async_op=True)
    buffer[4:].zero_()
    work.wait()

    assert not _changes(observed)
