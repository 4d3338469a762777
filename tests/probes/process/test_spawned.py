"""Ranks that a script starts by itself are written down before they begin."""

import pytest
import torch.multiprocessing as mp
from torch.multiprocessing import spawn, start_processes

from distdiag.events.lifecycle import ProbeDisabled, ProcessesSpawned
from tests.probes.conftest import Observed


def work(rank: int) -> None:
    pass


def test_each_way_to_start_them_is_recorded_with_its_place(observed: Observed) -> None:
    observed.install("spawned-processes")

    mp.spawn(work, nprocs=2)
    spawn(work)
    mp.start_processes(work, (), 2, start_method="fork")

    events = observed.events(ProcessesSpawned)
    assert [event.number for event in events] == [2, 1, 2]
    for event in events:
        assert event.site.location is not None
        assert event.site.location.file == __file__


def test_what_a_rank_starts_are_helpers(observed: Observed, lone_group: None) -> None:
    observed.install("spawned-processes")

    mp.spawn(work)

    assert not observed.events(ProcessesSpawned)


def test_arguments_that_torch_refuses_are_left_to_it(observed: Observed) -> None:
    observed.install("spawned-processes")

    with pytest.raises(TypeError):
        mp.spawn()
    with pytest.raises(TypeError):
        mp.start_processes(work, nprocs="two")

    assert not observed.events(ProbeDisabled)
    observed.uninstall()
    assert mp.start_processes is start_processes
