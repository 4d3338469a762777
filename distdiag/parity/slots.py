"""How many runs of a comparison fit on this machine at the same time, and what each gets of it."""

import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import psutil

from distdiag.config.tasks import RankSummary
from distdiag.dumps.gpu.nvml import gpu_names

SHARE_OF_MEMORY: Final = 0.8
"""Of the memory that is free now, runs at the same time may take so much."""
RANKS_PER_CORE: Final = 1.5
"""Starting, reading and writing leave cores idle, so that somewhat more ranks than cores pay."""

Slot = Mapping[str, str]
"""The environment of what runs beside others."""


class Need(NamedTuple):
    """What one run takes, as the recorded run showed."""

    num_ranks: int
    memory: int
    devices: frozenset[str]


def need_of(summaries: Iterable[RankSummary], num_ranks: int) -> Need:
    """Return what a run on so many ranks takes, from what all ranks of another one took.

    A run on fewer ranks has the batches and the shards of all in fewer processes.
    """
    found = list(summaries)
    devices = frozenset(device for summary in found for device in summary.devices)
    return Need(num_ranks, sum(summary.peak_memory for summary in found), devices)


def slots_for(need: Need, num_runs: int, most: int | None) -> list[Slot]:
    """Return the places for runs at the same time: one if they must go one after the other."""
    by_cores = int(RANKS_PER_CORE * num_cores()) // need.num_ranks
    free = SHARE_OF_MEMORY * psutil.virtual_memory().available
    by_memory = int(free // need.memory) if need.memory else 1
    number = min(num_runs, most or num_runs, by_cores, by_memory)
    if number < 2:
        return [{}]
    if need.devices <= {"cpu"}:
        return [_threads(number, need.num_ranks)] * number
    return _of_gpus(number, need) or [{}]


def num_cores() -> int:
    """Return how many processor cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _threads(number: int, num_ranks: int) -> Slot:
    """Share the cores out; a launcher gives each of several ranks one thread by itself."""
    if num_ranks > 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // number))}


def _of_gpus(number: int, need: Need) -> list[Slot]:
    """Give each run GPUs of its own; none if there are not enough of one kind."""
    if need.devices - {"cpu", "cuda"}:
        return []
    names = gpu_names()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(map(str, range(len(names)))) if visible is None else visible.split(",")
    if len(set(names)) != 1 or len(gpus) > len(names):
        return []
    fitting = min(number, len(gpus) // need.num_ranks)
    parts = [gpus[i * need.num_ranks : (i + 1) * need.num_ranks] for i in range(fitting)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts] if fitting > 1 else []
