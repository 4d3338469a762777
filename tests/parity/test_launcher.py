"""Tests of runs: several at the same time, without starting any, and one that fails."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distdiag.config.tasks import ParityTask
from distdiag.events.errors import UsageError
from distdiag.parity.launcher import FailedRunError, Launcher, RunSpec, Script, wait_for_monitor
from distdiag.parity.study import read_recording
from distdiag.record.run_dir import RunDir
from distdiag.reports import write_report
from tests.parity.recordings import run_of
from tests.parity.test_report import finding, own

HELD = {"loss": 1.0, "gradient": np.ones(2), "start": np.ones(2), "update": np.ones(2)}


class FakeRuns(Launcher):
    """Runs that fail as asked, and note in which slots they were."""

    def __init__(self, folder: Path, errors):
        super().__init__(folder, Script("train.py", ()), 1.0, read_recording)
        self.folder, self.errors, self.made = folder, errors, []

    def run(self, spec, slot):
        self.made.append((spec.name, slot["at"]))
        if self.errors.get(spec.name):
            raise self.errors[spec.name].pop()
        return run_of(self.folder / spec.name, spec.label, [HELD])


def specs(*names):
    task = ParityTask(folder="", num_steps=1)
    return [RunSpec(name, name, 1, task) for name in names]


def test_the_runs_come_in_the_order_asked_for(tmp_path):
    runs = FakeRuns(tmp_path, {})
    found = runs.run_all(specs("a", "b", "c"), [{"at": "0"}, {"at": "1"}])
    assert [run.label for run in found] == ["a", "b", "c"]
    assert sorted(name for name, _ in runs.made) == ["a", "b", "c"]


def test_what_fails_beside_others_runs_once_more_alone_in_its_slot(tmp_path):
    runs = FakeRuns(tmp_path, {"a": [FailedRunError("the port is taken")]})
    found = runs.run_all(specs("a", "b"), [{"at": "0"}, {"at": "0"}])
    assert [run.label for run in found] == ["a", "b"]
    assert runs.made[-1] == ("a", "0") and len(runs.made) == 3


def test_what_fails_alone_has_failed(tmp_path):
    runs = FakeRuns(tmp_path, {"a": [FailedRunError("a bug")] * 2})
    with pytest.raises(FailedRunError):
        runs.run_all(specs("a"), [{"at": "0"}])
    assert len(runs.made) == 1


def test_what_cannot_be_compared_is_not_tried_again(tmp_path):
    runs = FakeRuns(tmp_path, {"a": [UsageError("other batches")]})
    with pytest.raises(UsageError, match="other batches"):
        runs.run_all(specs("a", "b"), [{"at": "0"}, {"at": "1"}])
    assert [name for name, _ in runs.made].count("a") == 1


def test_a_script_that_fails_is_named_with_its_status_its_last_words_and_its_output(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('there is no data')\n")
    runs = Launcher(tmp_path / "runs", Script(str(script), ()), 100.0, read_recording)
    task = ParityTask(folder=str(tmp_path / "runs" / "one" / "records"), num_steps=1)
    with pytest.raises(FailedRunError) as caught:
        runs.run(RunSpec("one", "1 rank", 1, task), {})
    log = tmp_path / "runs" / "one" / "output.log"
    assert str(caught.value).startswith("1 rank ended with status 1")
    assert str(caught.value).endswith(f"its output is in {log}")
    assert "there is no data" in log.read_text()
    assert runs.report("one").run.world_size == 1


class LeavingRuns(Launcher):
    """Runs of which a rank fails, since another has left with its last step."""

    def _launch(self, spec, log, slot):
        (log.parent / "run").mkdir()
        log.write_text("")
        run_of(Path(spec.task.folder), spec.label, [HELD, HELD], num_steps=2)
        write_report(log.parent / "run" / "report.json", own(finding("COL012"), finding("REP001")))
        return 1


def test_ranks_that_fail_when_all_have_taken_their_steps_have_not_failed(tmp_path):
    runs = LeavingRuns(tmp_path, Script("train.py", ()), 1.0, read_recording)
    task = ParityTask(folder=str(tmp_path / "two" / "records"), num_steps=2)
    assert runs.run(RunSpec("two", "2 ranks", 2, task), {}).num_steps == 2
    assert [each.code for each in runs.report("two").findings] == ["REP001"]
    task = ParityTask(folder=str(tmp_path / "two" / "records"), num_steps=3)
    with pytest.raises(FailedRunError):
        runs.run(RunSpec("two", "2 ranks", 2, task), {})


def test_a_monitor_that_has_not_begun_yet_is_waited_for_by_its_guard(tmp_path):
    run_dir = RunDir(tmp_path, 0)
    run_dir.folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.4)"])
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    run_dir.monitor_pids.write_text(f"{process.pid} {ticks}\n1 1\n")
    wait_for_monitor(run_dir, 30.0)
    assert process.poll() == 0
    wait_for_monitor(run_dir, 30.0)  # it is gone
