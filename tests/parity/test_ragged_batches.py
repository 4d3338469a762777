"""A right program whose batches have unequal lengths agrees with one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.reports import read_report
from tests import forked

SCRIPT = Path(__file__).parent / "programs" / "ragged_pairs.py"

pytestmark = pytest.mark.timeout(600)


def findings_of(run_dir, *options, script=()):
    command = ["-m", "distdiag.cli", "parity", *options]
    done = forked.run([*command, "--run-dir", str(run_dir), str(SCRIPT), *script], timeout=500)
    assert done.returncode == 0, done.stderr + done.stdout
    findings = read_report(run_dir / "report.json").findings
    return [finding for finding in findings if finding.code.startswith("PAR")]


def test_the_collate_function_fills_up_what_only_it_knows(tmp_path):
    """The script ends, and destroys its group, before the steps that were asked for."""
    assert findings_of(tmp_path / "run", "--steps", "10") == []
