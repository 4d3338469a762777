"""The quick part of the matrix: right runs are left in peace, broken ones are blamed rightly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


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
