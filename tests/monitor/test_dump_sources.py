from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdiag.dumps.process.kernel import Task
from distdiag.monitor.dump_sources import DumpSources
from distdiag.record.run_dir import RunDir


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import threading, time; print('here', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    while Task(process.pid).call.name != "clock_nanosleep":
        time.sleep(0.01)
    yield process
    process.kill()
    process.communicate()


def _sources(folder: Path) -> DumpSources:
    run_dir = RunDir(folder, 0)
    run_dir.folder.mkdir(parents=True)
    return DumpSources(run_dir, None, dict, may_ask_nccl=False)


def test_the_first_source_that_can_see_a_rank_is_used(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    (stacks,) = _sources(tmp_path).stacks({3: sleeper.pid}, 20.0)
    assert (stacks.rank, stacks.source, stacks.error) == (3, "py-spy", "")
    assert [thread.name for thread in stacks.threads] == ["MainThread"]


def test_when_nobody_can_see_a_rank_each_says_why(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (stacks,) = _sources(tmp_path).stacks({3: gone.pid}, 20.0)
    assert stacks.threads == ()
    assert stacks.error.startswith("py-spy: ")
    assert "; faulthandler: " in stacks.error


def test_everybody_else_is_asked_about_each_rank(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    sources = _sources(tmp_path)
    sources.meet(sleeper.pid)
    reported = {event.source: event for event in sources.outside({3: sleeper.pid}, 3.0)}
    assert {"kernel", "holders", "stderr", "flight-recorder"} <= reported.keys()
    assert "nccl-ras" not in reported
    assert reported["kernel"].values["state"] == "S"
    assert reported["flight-recorder"].error
    assert {event.rank for event in reported.values()} == {3}


def test_a_rank_without_a_process_is_reported_as_such(tmp_path: Path) -> None:
    assert _sources(tmp_path).no_process(5).error == "there is no process"
