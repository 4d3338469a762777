"""A program of two ranks in lock-step that prints its steps; one thing goes wrong in it.

Its ranks wait for one another in an all_reduce of gloo, or, without torch, by files.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from soak_faults import BEGIN, END, FAULTS, MIDDLE, RANKS, Scene

NUM_STEPS = 6
FAULT_STEP = 3


def by_files(folder: Path, rank: int) -> Callable[[int], None]:
    """Return what lets a rank wait, in a step, for the other one."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

    def meet(step: int) -> None:
        (folder / f"{attempt}-{step}-{rank}").touch()
        other = folder / f"{attempt}-{step}-{1 - rank}"
        while not other.exists():
            time.sleep(0.005)

    return meet


def by_gloo() -> Callable[[int], None]:
    """Do the same in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def meet(step: int) -> None:
        value = torch.full((4,), float(step))
        dist.all_reduce(value)
        assert value[0].item() == 2 * step

    return meet


def main() -> None:
    """Train, so to speak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("target")
    parser.add_argument("when", choices=(BEGIN, MIDDLE, END))
    parser.add_argument("folder", type=Path)
    parser.add_argument("run_dir", type=Path, nargs="?")
    parser.add_argument("--gloo", action="store_true")
    options = parser.parse_args()
    scene = Scene(int(os.environ["RANK"]), options.folder, options.run_dir)
    doers = {RANKS[0]: {0}, RANKS[1]: {1}, "all ranks": {0, 1}}.get(options.target, {1})

    def reach(when: str) -> None:
        if when == options.when and scene.rank in doers:
            FAULTS[options.fault].act(scene)

    def say(text: str) -> None:
        sys.stdout.write(f"rank {scene.rank} {text}\n")
        sys.stdout.flush()

    meet = by_files(options.folder, scene.rank)
    say("begins")
    meet(0)
    reach(BEGIN)
    if options.gloo:
        meet = by_gloo()
    for step in range(1, NUM_STEPS):
        say(f"step {step}")
        if step == FAULT_STEP:
            reach(MIDDLE)
        meet(step)
        time.sleep(0.05)
    if options.gloo:
        import torch.distributed as dist

        dist.destroy_process_group()
    say("ends")
    reach(END)


if __name__ == "__main__":
    main()
