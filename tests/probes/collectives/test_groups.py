from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.probes.collectives.groups import ProcessGroups
from tests.probes.conftest import Observed


def test_a_group_is_written_before_and_after_it_is_made(
    observed: Observed, fake_group: None
) -> None:
    observed.install("process-groups")

    dist.new_group([1, 0], timeout=timedelta(seconds=7), group_desc="pair")

    before, after = observed.events(GroupCreated)
    assert (before.done, after.done) == (False, True)
    assert (before.api, before.ordinal, before.scope) == ("new_group", 0, (0, 1))
    assert (before.ranks, before.desc, before.timeout_s) == ((1, 0), "pair", 7.0)
    assert before.site.location is not None
    assert before.site.location.file == __file__


def test_calls_of_two_threads_at_once_are_both_written(
    observed: Observed, fake_group: None
) -> None:
    (probe,) = observed.install("process-groups")
    assert isinstance(probe, ProcessGroups)

    with probe._inside():  # this thread is in the middle of a call
        thread = threading.Thread(target=dist.new_group, args=([0],), name="second")
        thread.start()
        thread.join()
        dist.new_group([0])  # and this belongs to it

    assert [(event.thread, event.done) for event in observed.events(GroupCreated)] == [
        ("second", False),
        ("second", True),
    ]


def test_the_backends_are_those_that_torch_makes_of_what_was_asked_for(
    observed: Observed, lone_group: None
) -> None:
    observed.install("process-groups")

    dist.new_group([0])
    dist.new_group([0], backend="cpu:gloo")
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)

    asked = [(event.api, event.backend) for event in observed.events(GroupCreated) if event.done]
    assert asked == [
        ("new_group", "cpu:gloo,cuda:gloo"),
        ("new_group", "cpu:gloo"),
        ("destroy_process_group", ""),
        ("init_process_group", "cpu:gloo"),
    ]


def test_a_non_member_makes_the_call_too(observed: Observed, fake_group: None) -> None:
    observed.install("process-groups")

    dist.new_group([1])

    assert observed.events(GroupCreated)[0].ranks == (1,)


def test_a_group_with_local_synchronisation_concerns_its_members_only(
    observed: Observed, fake_group: None
) -> None:
    observed.install("process-groups")

    dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 1])

    calls = [event for event in observed.events(GroupCreated) if not event.done]
    assert [(call.scope, call.ordinal) for call in calls] == [((0,), 0), ((0, 1), 0)]


def test_a_mesh_is_named_by_what_the_user_called(observed: Observed, fake_group: None) -> None:
    observed.install("process-groups")

    init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))

    calls = [event for event in observed.events(GroupCreated) if not event.done]
    assert calls
    assert {call.api for call in calls} == {"init_device_mesh"}
    assert [call.ordinal for call in calls] == list(range(len(calls)))


def test_each_initialisation_is_a_generation(observed: Observed, lone_group: None) -> None:
    observed.install("process-groups")

    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    events = [(event.api, event.generation, event.done) for event in observed.events(GroupCreated)]
    assert events == [
        ("destroy_process_group", 0, False),
        ("destroy_process_group", 0, True),
        ("init_process_group", 1, False),
        ("init_process_group", 1, True),
    ]


def test_arguments_that_torch_refuses_are_torchs_error(
    observed: Observed, fake_group: None
) -> None:
    observed.install("process-groups")

    with pytest.raises(TypeError):
        dist.new_group(no_such_argument=1)
    with pytest.raises((ValueError, RuntimeError)):
        dist.new_group([0, 0])
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("fake")

    assert observed.events(ProbeDisabled) == []
    assert observed.recorder.generation == 0
