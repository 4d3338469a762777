"""The short form of scripts/soak.py: some thirteen runs that go wrong, each in another way."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "scripts" / "soak.py"


@pytest.mark.timeout(300)
def test_whatever_befalls_a_run_its_report_is_there_and_true(tmp_path):
    kept = tmp_path / "trials"
    done = subprocess.run(
        [sys.executable, str(SOAK), "--short", "--json", str(kept)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    assert len(kept.read_text().splitlines()) >= 12, done.stdout
