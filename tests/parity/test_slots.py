"""Tests of how many runs are made at the same time."""

from types import SimpleNamespace

import pytest

from distdiag.config.tasks import RankSummary
from distdiag.parity import slots
from distdiag.parity.slots import Need, need_of, slots_for

GB = 1_000_000_000


@pytest.fixture
def machine(monkeypatch):
    def machine(*, cores=8, free=100 * GB, gpus=()):
        monkeypatch.setattr(slots, "num_cores", lambda: cores)
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr(slots.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(slots, "gpu_names", lambda: list(gpus))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return machine


def need(*devices, num_ranks=1, memory=GB):
    return Need(num_ranks, memory, frozenset(devices or ("cpu",)))


def test_runs_share_the_cores(machine):
    machine(cores=8)
    assert slots_for(need(), 3, None) == [{"OMP_NUM_THREADS": "2"}] * 3


def test_three_repeats_fit_on_two_cores(machine):
    machine(cores=2)
    assert slots_for(need(), 3, None) == [{"OMP_NUM_THREADS": "1"}] * 3


@pytest.mark.parametrize(
    ("have", "wanted", "most"),
    [
        ({"cores": 1}, need(), None),
        ({"free": 2 * GB}, need(memory=GB), None),
        ({"cores": 4}, need(num_ranks=4), None),
        ({}, need(), 1),
        ({}, need(memory=0), None),
    ],
)
def test_without_room_they_go_one_after_the_other(machine, have, wanted, most):
    machine(**have)
    assert slots_for(wanted, 3, most) == [{}]


def test_the_threads_that_the_user_chose_are_left(machine, monkeypatch):
    machine()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert slots_for(need(), 3, None) == [{}] * 3


def test_each_run_gets_gpus_of_its_own(machine, monkeypatch):
    machine(gpus=["H200"] * 4)
    wanted = need("cpu", "cuda", num_ranks=2)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots_for(wanted, 3, None)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found = slots_for(need("cuda"), 3, None)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in found] == ["3", "1"]


@pytest.mark.parametrize("gpus", [["H200"], ["H200", "A100"], []])
def test_gpus_that_are_few_or_unlike_are_used_in_turn(machine, gpus):
    machine(gpus=gpus)
    assert slots_for(need("cuda"), 3, None) == [{}]


def test_another_accelerator_is_used_in_turn(machine):
    machine(gpus=["H200"] * 4)
    assert slots_for(need("xpu"), 3, None) == [{}]


def test_a_run_on_one_rank_needs_what_all_ranks_took():
    summaries = [
        RankSummary(
            rank=rank, world_size=2, num_steps=1, num_batches=1, devices=("cuda",), peak_memory=GB
        )
        for rank in range(2)
    ]
    assert need_of(summaries, 1) == Need(1, 2 * GB, frozenset({"cuda"}))
