"""A right program with batches of unequal lengths is not proven wrong by what fills them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdiag.findings.finding import Grade, Severity
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


def test_zeros_that_the_comparison_has_put_into_labels_prove_nothing(tmp_path):
    (finding,) = findings_of(tmp_path / "run", "--steps", "2", script=("--num-steps", "4"))
    assert (finding.severity, finding.grade) == (Severity.INFO, Grade.NOTE)
    assert "--pad 0=VALUE --pad 1=VALUE" in finding.message


def test_values_that_are_named_do_and_the_group_may_be_gone_at_the_end(tmp_path):
    """The script ends, and destroys its group, before the steps that were asked for."""
    options = ("--steps", "10", "--pad", "0=0", "--pad", "1=-7")
    assert findings_of(tmp_path / "run", *options) == []
