"""Which rank a process is, from the environment that launchers and frameworks give it."""

import os

import pytest

from distdiag.agent.launch import read_launch
from distdiag.events.errors import RankError

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
LIGHTNING = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
INSIDE_TASK_0 = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}


@pytest.mark.parametrize(
    ("environ", "rank", "local_rank", "world", "local_world"),
    [
        ({}, 0, 0, 1, 1),
        (TORCHRUN, 3, 1, 4, 2),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 1, 2, 2),
        (SLURM, 5, 1, 8, 8),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4"}, 5, 1, 8, 4),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}, 5, 1, 8, 4),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2(x2),3,1", "SLURM_NODEID": "2"}, 5, 1, 8, 3),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4", "SLURM_NODEID": "7"}, 5, 1, 8, 8),
        (SLURM | {"LOCAL_RANK": "1", "WORLD_SIZE": "8"}, 5, 1, 8, 8),
        # Started by Lightning, which tells the local rank only.
        (LIGHTNING, 1, 1, 2, 2),
        (INSIDE_TASK_0 | LIGHTNING, 1, 1, 2, 2),
        ({"LOCAL_RANK": "0"}, 0, 0, 1, 1),
        # torchrun --virtual-local-rank: each rank sees one GPU and is told that it is the first.
        ({"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 1, 1, 2, 2),
        # What is no number counts as not set.
        ({"RANK": "²", "WORLD_SIZE": "-2", "LOCAL_RANK": "x"}, 0, 0, 1, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "1" * 5000}, 0, 0, 1, 1),
    ],
)
def test_the_environment_tells_the_rank(environ, rank, local_rank, world, local_world):
    launch = read_launch(environ)
    assert (launch.rank, launch.local_rank) == (rank, local_rank)
    assert (launch.world_size, launch.local_world_size) == (world, local_world)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"LOCAL_RANK": "1"}, "rank 1 of 1"),
        ({"RANK": "3"}, "rank 3 of 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "contradicts itself"),
        ({"RANK": "0", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}, "contradicts itself"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "1"}, "no RANK"),
        ({"RANK": "0", "WORLD_SIZE": "999999999"}, "so many ranks"),
    ],
)
def test_a_rank_that_is_not_known_is_not_guessed(environ, problem):
    with pytest.raises(RankError, match=problem):
        read_launch(environ)


def test_the_first_process_of_a_container_has_no_parent(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 0)
    launch = read_launch({"RANK": "3", "WORLD_SIZE": "8"})
    assert launch.parent_pid == os.getpid()
