"""The same on all nodes of a job: ``torchrun ... -m distdiag.doctor.job``.

Each rank brings the answers of its machine to rank 0 and takes part in a few collectives.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from distdiag.doctor.answers import Answer, State, joined, lines, worst
from distdiag.doctor.machine import look_at_machine

_TIMEOUT: Final = timedelta(seconds=120)
_NUM_BYTES: Final = 64 << 20
_NUM_ROUNDS: Final = 5
_SKEW_S: Final = 1.0
"""Clocks further apart make the times of logs useless; NTP keeps them within milliseconds."""


def main() -> int:
    """Look, compare, and print on rank 0; the status is 1 if there is a problem anywhere."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local)
    own = list(look_at_machine(os.environ, Path.cwd())) if local == 0 else []
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
    gathered: list[list[Answer] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    by_rank = {rank: answers for rank, answers in enumerate(gathered) if answers}
    answers = [*joined(by_rank), *_clocks(), *_collectives(on_gpu=on_gpu)]
    is_bad = worst(answers) is State.BAD
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(lines(answers)) + "\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    return int(is_bad)


def _clocks() -> Iterator[Answer]:
    """Compare the wall clocks right after a barrier; its ends differ by milliseconds."""
    dist.barrier()
    times: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, time.time())
    apart_s = max(times) - min(times)
    if apart_s < _SKEW_S:
        yield Answer("clocks", State.GOOD, f"within {apart_s:.2g} s")
        return
    seen = f"that of rank {times.index(max(times))} is {apart_s:.1f} s ahead"
    yield Answer("clocks", State.DOUBTFUL, seen, "let NTP or chrony set the clocks of all nodes")


def _collectives(*, on_gpu: bool) -> Iterator[Answer]:
    """Sum a tensor over all ranks, and look at the result and the time it takes."""
    device = torch.device("cuda") if on_gpu else torch.device("cpu")
    values = torch.ones(_NUM_BYTES // 4, device=device)
    dist.all_reduce(values)
    is_right = bool((values == dist.get_world_size()).all())
    begun = time.perf_counter()
    for _ in range(_NUM_ROUNDS):
        dist.all_reduce(values.fill_(1.0))
    if on_gpu:
        torch.cuda.synchronize()
    taken_s = (time.perf_counter() - begun) / _NUM_ROUNDS
    everywhere: list[tuple[bool, float]] = [(True, 0.0)] * dist.get_world_size()
    dist.all_gather_object(everywhere, (is_right, taken_s))
    wrong = [rank for rank, (right, _) in enumerate(everywhere) if not right]
    slowest_s = max(seconds for _, seconds in everywhere)
    rate = _NUM_BYTES / slowest_s / 1e9
    seen = f"64 MiB over {len(everywhere)} ranks in {slowest_s * 1e3:.1f} ms ({rate:.1f} GB/s)"
    if wrong:
        advice = "a link or a GPU changes what is sent: test the node alone, then drain it"
        yield Answer("all_reduce", State.BAD, f"wrong sum on ranks {wrong}", advice)
    else:
        yield Answer("all_reduce", State.GOOD, seen)


if __name__ == "__main__":
    sys.exit(main())
