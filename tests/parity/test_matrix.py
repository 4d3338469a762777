"""The quick part of the matrix: right runs are left in peace, broken ones are blamed rightly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.parity_matrix.comparing import Verdict
from scripts.parity_matrix.plan import Run
from scripts.parity_matrix.table import is_good, summary, table

ROOT = Path(__file__).resolve().parents[2]


def verdict(mutation, *, is_found=True, is_right=True):
    run = Run("ddp", 0, mutation)
    return Verdict("mlp", "fp32", run, is_found=is_found, is_right=is_found and is_right)


def test_one_right_run_that_is_accused_spoils_the_matrix():
    broken = [verdict("drop") for _ in range(20)]
    assert is_good([*broken, verdict("clean", is_found=False)])
    assert not is_good([*broken, verdict("clean", is_found=True)])


@pytest.mark.parametrize(
    ("num_missed", "num_wrong", "is_enough"), [(5, 5, True), (6, 0, False), (0, 11, False)]
)
def test_enough_broken_runs_must_be_found_and_blamed(num_missed, num_wrong, is_enough):
    found = [verdict("sum", is_found=n >= num_missed) for n in range(100 - num_wrong)]
    found += [verdict("sum", is_right=False) for _ in range(num_wrong)]
    assert is_good(found) is is_enough


def test_the_table_counts_found_blamed_and_all():
    found = [verdict("lr"), verdict("lr", is_right=False), verdict("lr", is_found=False)]
    found.append(verdict("clean", is_found=False))
    lines = table(found).splitlines()
    assert "| clean | 0 / 1 | 0 / 1 |" in lines
    assert "| lr | 2 / 1 / 3 | 2 / 1 / 3 |" in lines
    assert summary(found) in table(found)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_right_runs_agree_and_broken_ones_are_blamed(tmp_path):
    table = tmp_path / "table.md"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scripts.parity_matrix", "--quick", "--jobs", "2"),
            *("--table", str(table)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    rows = dict(
        line.strip("| ").split(" | ", 1)
        for line in table.read_text().splitlines()
        if line.startswith("| ") and "---" not in line
    )
    assert rows["clean"].endswith("0 / 24")
    assert {"drop", "sum", "scale", "swap", "mask", "stale", "dropout", "lr"} <= set(rows)
