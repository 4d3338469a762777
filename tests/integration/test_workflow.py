"""A workflow checks a training on real ranks: a new finding fails it, a known one does not."""

import re
import shutil
from pathlib import Path

from distdiag.reports import read_report
from tests import forked
from tests.integration.launch import run_command
from tests.reports.sarif_model import read_log

WORKFLOW = Path(__file__).parent / "workflow"


def steps_of(output: str) -> dict[str, tuple[int, list[str]]]:
    """Return by the name of a step its status, and the annotations that it showed."""
    found = {}
    for part in output.split("step: ")[1:]:
        name, _, text = part.partition("\n")
        status = re.findall(r"^status: (\d+)$", text, re.M)
        assert len(status) == 1, part
        found[name] = int(status[0]), re.findall(r"^::\w+ .*$", text, re.M)
    return found


def test_a_new_finding_fails_a_workflow_and_a_known_one_does_not(tmp_path: Path) -> None:
    shutil.copytree(WORKFLOW, tmp_path, dirs_exist_ok=True)
    summary = tmp_path / "summary.md"
    environ = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    # Annotations come on stderr: one stream keeps them beside the steps.
    command = ["bash", "-c", f"./steps.sh {forked.stand_in()} 2>&1"]
    outcome = run_command(command, tmp_path, environ)
    steps = steps_of(outcome.stdout)

    status, (annotation,) = steps["first run"]
    assert status == 1, outcome.describe()
    assert annotation.startswith("::error file=train.py,line=12,title=COL005 reduce-op-mismatch::")
    assert steps["accept"] == (0, [])
    assert steps["same fault"] == (0, []), outcome.describe()
    status, (annotation,) = steps["new fault"]
    assert status == 1, outcome.describe()
    assert annotation.startswith("::error file=train.py,line=15,title=COL005 reduce-op-mismatch::")

    same = read_report(tmp_path / "same")
    assert (same.counts.error, same.counts.baselined, same.exit_status) == (0, 1, 0)
    assert {path.name for path in (tmp_path / "same").glob("report.*")} == {
        "report.json",
        "report.junit.xml",
        "report.sarif",
    }
    assert summary.read_text().count("## distdiag: 1 error") == 2
    assert steps["upload"][0] == 1
    results = read_log((tmp_path / "report.sarif").read_text()).runs[0].results
    assert [len(result.suppressions) for result in results] == [0, 1]
