#!/usr/bin/env python
"""Measure what ``reuse="module"`` saves: ``scripts/bench_reuse.py [--tests 10] [--runs 3]``.

Each run is a real pytest of so many tests on two ranks, once with ranks that are started for each
test and once with forked ones. The time is that of the tests, without pytest's own start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Final
from xml.etree import ElementTree

TESTS: Final = """
import pytest, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

@pytest.mark.parametrize("number", range({tests}))
@pytest.mark.distdiag(world_size=2, reuse={reuse!r})
def test_step(number):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    total = next(model.parameters()).detach().clone()
    dist.all_reduce(total)
    assert torch.equal(total, 2 * next(model.parameters()))
"""


def run_s(tests: int, reuse: str | None) -> float:
    """Return how many seconds the tests took together."""
    with tempfile.TemporaryDirectory() as folder:
        file, xml = Path(folder, "test_steps.py"), Path(folder, "junit.xml")
        file.write_text(TESTS.format(tests=tests, reuse=reuse))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junitxml={xml}", file.name], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return sum(float(case.get("time", 0)) for case in ElementTree.parse(xml).iter("testcase"))


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    # Alternating, so that what else the machine does falls on both.
    pairs = [(run_s(given.tests, None), run_s(given.tests, "module")) for _ in range(given.runs)]
    alone, reused = (median(times) for times in zip(*pairs, strict=True))
    print(f"{given.tests} tests, 2 ranks: {alone:.1f} s, with reuse {reused:.1f} s")
    print(f"{alone / reused:.1f} times as fast; runs: {pairs}")


if __name__ == "__main__":
    main()
