"""Which rank of which launch this process is, as its environment tells it."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from distdiag.events.errors import RankError
from distdiag.record.run_dir import Launch
from distdiag.record.status_page import start_ticks

LARGEST_WORLD: Final = 1 << 20
"""More ranks than any cluster has: a number above it was not meant as one."""


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read who this process is from what torchrun, srun or mpirun put into the environment.

    Raises:
        RankError: that is not known, or the variables contradict one another.

    """
    world = _number(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", default=1)
    rank = _rank(environ)
    local_rank = _number(
        environ,
        "LOCAL_RANK",
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        default=0 if world == 1 else rank,
    )
    _require_sense(rank, local_rank, world)
    local_world = _number(environ, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", default=0)
    if local_world == world:
        local_rank = rank  # torchrun --virtual-local-rank says 0 to all ranks of a node
    local_world = local_world or _number(
        environ, "SLURM_NTASKS_PER_NODE", default=_tasks_here(environ) or world
    )
    parent = os.getppid() if world > 1 or "RANK" in environ else os.getpid()
    parent = parent or os.getpid()  # the first process of a container has none
    place = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    job = f"{place}:{environ.get('TORCHELASTIC_RUN_ID', '')}:{environ.get('SLURM_JOB_ID', '')}"
    one_node = f"{parent}:{start_ticks(parent)}"
    return Launch(
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=min(local_world, world),
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        max_attempts=_number(environ, "TORCHELASTIC_MAX_RESTARTS", default=0) + 1,
        parent_pid=parent,
        identity=one_node if local_world >= world else job,
        started_s=_started_s(parent),
        master_addr=environ.get("MASTER_ADDR", ""),
        is_alone=world == 1 and "RANK" not in environ,
    )


def _number(environ: Mapping[str, str], *names: str, default: int) -> int:
    """Return the first of these variables that is a number; what is none counts as not set."""
    given = (environ.get(name, "") for name in names)
    return next((int(text) for text in given if text.isdecimal() and len(text) < 10), default)


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return how many tasks srun starts on this node, of "2(x3),1" for four nodes; 0 if unknown."""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    nodes = 0
    for tasks, times in re.findall(r"(\d{1,6})(?:\(x(\d{1,6})\))?", per_node):
        nodes += int(times or 1)
        if _number(environ, "SLURM_NODEID", default=0) < nodes:
            return int(tasks)
    return 0


def _rank(environ: Mapping[str, str]) -> int:
    """Return the global rank.

    Some frameworks tell the processes that they start the local rank only, as Lightning does. A
    scheduler's numbers are then those of the process that started them.
    """
    given = _number(environ, "RANK", default=-1)
    if given >= 0:
        return given
    local_rank = _number(environ, "LOCAL_RANK", default=-1)
    for rank, local in (
        ("SLURM_PROCID", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ):
        given = _number(environ, rank, default=-1)
        if given >= 0 and local_rank in (-1, _number(environ, local, default=local_rank)):
            return given
    node = _number(environ, "NODE_RANK", "GROUP_RANK", default=0)
    if local_rank > 0 and node > 0:
        raise RankError(
            f"the environment has LOCAL_RANK={local_rank} and no RANK, and this is node {node}"
        )
    return max(local_rank, 0)


def _require_sense(rank: int, local_rank: int, world: int) -> None:
    claim = f"rank {rank} of {world} (local rank {local_rank})"
    if world > LARGEST_WORLD:
        raise RankError(f"the environment says {claim}: so many ranks there cannot be")
    if not local_rank <= rank < world:
        raise RankError(
            f"the environment says {claim}, which contradicts itself (RANK, LOCAL_RANK, WORLD_SIZE)"
        )


def _started_s(pid: int) -> float:
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - uptime + start_ticks(pid) / os.sysconf("SC_CLK_TCK")
