"""The monitor of a real run: nobody's child, started again when it dies, never silently missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil
import pytest

from distdiag.agent.monitor_process import MonitorProcess
from distdiag.dumps.process.proc import Process
from distdiag.findings.finding import Outcome, Report
from distdiag.findings.report_json import decode_report
from distdiag.parity.launcher import wait_for_monitor
from distdiag.record.private_file import RESERVE_BYTES
from distdiag.record.run_dir import RunDir
from tests import forked

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(180)

KILLING = """
import os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1], "attempt-0")

def pids():
    return [int(line.split()[0]) for line in (folder / "monitor.pids").read_text().splitlines()]

def until(is_true):
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)

def kill(pids):
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees another one die
        for pid in pids:
            os.kill(pid, number)

until((folder.parent / "report.json").exists)
guard, monitor, _ = pids()
"""


def can_tell_late() -> bool:
    """Say whether the kernel tells how a process ended that its parent has waited for."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
    followed = Process(process.pid)
    process.wait()
    return followed.exit_status == 3


class Ended(NamedTuple):
    """How a run ended, and what it left."""

    status: int
    stdout: str
    stderr: str
    run_dir: RunDir

    @property
    def report(self) -> Report:
        return decode_report(self.run_dir.report.read_bytes())


def run(
    folder: Path,
    text: str,
    launcher: tuple[str, ...] = ("-m",),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run a script under the check; its argument is the run directory."""
    script, root = folder / "train.py", folder / "run"
    script.write_text(text)
    command = [sys.executable, *launcher, "distdiag.check", "--run-dir", str(root)]
    # Files and not pipes: a monitor that was stopped would hold a pipe for ever.
    with (folder / "out").open("w") as stdout, (folder / "err").open("w") as stderr:
        done = subprocess.run(
            [*command, str(script), str(root)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            timeout=120,
            check=False,
        )
    output, errors = (folder / "out").read_text(), (folder / "err").read_text()
    return Ended(done.returncode, output, errors, RunDir(root, 0))


def run_on_two_ranks(folder: Path, text: str) -> Ended:
    """Run a script on ranks under the check; its argument is the run directory."""
    script, root = folder / "train.py", folder / "run"
    script.write_text(text)
    command = ["-m", "distdiag.check", "--run-dir", str(root), str(script), str(root)]
    done = forked.run(command, nproc=2, timeout=120, cwd=folder)
    return Ended(done.returncode, done.stdout, done.stderr, RunDir(root, 0))


REAPING = """
import os, signal, sys
import psutil
caught = []
signal.signal(signal.SIGCHLD, lambda *_: caught.append(1))
print("children", psutil.Process().children(recursive=True))
if os.fork() == 0:
    os._exit(5)
while True:
    try:
        print("reaped", os.waitstatus_to_exitcode(os.wait()[1]))
    except ChildProcessError:
        break
print("signals", len(caught))
"""

REAPED = "children []\nreaped 5\nsignals 1\n"


def test_a_script_that_waits_for_all_its_children_meets_no_monitor(tmp_path: Path) -> None:
    ended = run(tmp_path, REAPING)
    assert (ended.status, ended.stdout) == (0, REAPED), ended.stderr
    assert ended.report.complete
    assert ended.report.run.outcome is Outcome.FINISHED


SUBREAPER = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
"""


def test_a_monitor_that_has_made_way_for_that_of_the_ranks_was_not_killed(tmp_path: Path) -> None:
    run_dir, ranks = RunDir(tmp_path, 0), RunDir(tmp_path, 1)
    run_dir.create()
    ranks.create()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run_dir.monitor_pids.write_text(f"{ended.pid} 1\n")
    assert MonitorProcess(run_dir).was_killed
    ranks.job.write_text("{}")
    assert not MonitorProcess(run_dir).was_killed


def test_a_process_that_is_given_all_orphans_is_not_given_the_monitor(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(SUBREAPER)
    asking = (
        "import ctypes\nvalue = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(37, ctypes.byref(value), 0, 0, 0)\nprint('given', value.value)\n"
    )
    ended = run(tmp_path, asking + REAPING, launcher=(str(launcher),))
    assert ended.stdout == f"given 1\n{REAPED}", ended.stderr
    assert ended.report.complete


def test_a_script_that_kills_its_children_and_its_group_leaves_the_monitor(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "import os, signal\nimport psutil\n"
        "for child in psutil.Process().children(recursive=True):\n    child.kill()\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('told'))\n"
        "os.setpgid(0, 0)\nos.killpg(0, signal.SIGTERM)\n",
    )
    assert (ended.status, ended.stdout) == (0, "told\n"), ended.stderr
    assert ended.report.complete
    assert ended.report.findings == ()


def test_a_monitor_that_is_killed_is_started_again_and_says_so(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        f"{KILLING}kill([monitor])\nuntil(lambda: pids()[1] != monitor)\n"
        "print(os.getpid() not in (guard, *pids()))\n",
    )
    assert (ended.status, ended.stdout) == (0, "True\n"), ended.stderr
    assert ended.report.complete
    assert ended.report.run.outcome is Outcome.FINISHED
    (finding,) = ended.report.findings
    assert (finding.code, finding.severity) == ("DIA001", "info")
    assert "killed by signal 9, and was started again" in finding.message
    assert "killed by signal 9" in ended.run_dir.monitor_log.read_text()
    assert ended.stderr.count("started again") >= 2  # in a line of its own, and in the report


def test_with_its_guard_dead_as_well_it_is_started_again_by_who_stands_behind(
    tmp_path: Path,
) -> None:
    ended = run(
        tmp_path,
        f"{KILLING}kill([guard, monitor])\nuntil(lambda: pids()[1] != monitor)\n",
    )
    assert ended.status == 0, ended.stderr
    assert ended.report.complete
    assert ended.report.run.outcome is Outcome.FINISHED
    (finding,) = ended.report.findings
    assert "the monitor lost its guard to a signal, and was started again" in finding.message


def test_a_monitor_that_has_lost_its_guard_gives_way_to_one_that_has_one(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        f"{KILLING}kill([guard])\nuntil(lambda: pids()[1] != monitor)\n"
        "until(lambda: not Path(f'/proc/{monitor}').exists())\n",
    )
    assert ended.status == 0, ended.stderr
    assert ended.report.complete
    (finding,) = ended.report.findings
    assert "lost its guard" in finding.message


def test_with_all_of_them_dead_the_end_of_the_run_starts_another_one(tmp_path: Path) -> None:
    ended = run(tmp_path, f"{KILLING}kill(pids())\n")
    assert ended.status == 0, ended.stderr
    assert ended.report.complete
    assert ended.report.run.outcome is Outcome.FINISHED
    (finding,) = ended.report.findings
    assert "found dead at the end of the run" in finding.message


def test_a_monitor_that_cannot_be_had_at_the_end_is_said_loudly(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        f"{KILLING}kill(pids())\nimport subprocess\n"
        "def refuse(*_, **__): raise OSError('no processes left')\n"
        "subprocess.Popen = refuse\nsys.exit(0)\n",
    )
    assert ended.status == 0
    (line,) = [line for line in ended.stderr.splitlines() if "NOT JUDGED" in line]
    assert line.startswith("distdiag: the monitor died")
    assert f"distdiag analyze {ended.run_dir.root}" in line


def test_a_monitor_that_lags_at_the_end_is_said_loudly(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        f"{KILLING}os.kill(monitor, signal.SIGSTOP)\n"
        "import distdiag.agent.verdict\ndistdiag.agent.verdict.VERDICT_S = 1.0\n",
    )
    pid = int(ended.run_dir.monitor_pid.read_text())
    psutil.Process(pid).resume()
    assert ended.status == 0
    assert "the monitor has given no verdict within 1 s: THIS RUN WAS NOT JUDGED" in ended.stderr
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert ended.report.complete  # it was only late


FAILING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dtype = (torch.float32, torch.int32)[dist.get_rank()]
dist.all_reduce(torch.ones(3, dtype=dtype))
dist.barrier()
if dist.get_rank() == 0:
    kill(pids())
dist.barrier()
dist.destroy_process_group()
"""


def test_what_a_dead_monitor_would_have_found_still_fails_the_run(tmp_path: Path) -> None:
    ended = run_on_two_ranks(tmp_path, KILLING + FAILING)
    report = ended.report
    assert report.complete, ended.stderr
    assert "COL004" in {finding.code for finding in report.findings if finding.severity == "error"}
    assert ended.status == 1, ended.stderr


RAISING = """
import os, signal, time
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    kill(pids())
    raise ValueError("nobody watches")
dist.barrier()
"""


def test_a_rank_that_fails_when_nobody_watches_is_reported_nevertheless(tmp_path: Path) -> None:
    ended = run_on_two_ranks(tmp_path, KILLING + RAISING)
    assert ended.status == 1, ended.stderr
    # The ranks may be gone before the monitor that they have started is there.
    deadline = time.monotonic() + 60
    while not (report := ended.report).complete:
        assert time.monotonic() < deadline, ended.stderr
        time.sleep(0.05)
    assert report.run.outcome is Outcome.FAILED
    (finding,) = [each for each in report.findings if each.severity == "error"]
    assert (finding.code, tuple(finding.ranks)) == ("HNG001", (1,))


def test_how_a_rank_ended_is_known_though_the_monitor_has_just_begun(tmp_path: Path) -> None:
    ended = run(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    wait_for_monitor(ended.run_dir, 60.0)
    assert ended.status == -signal.SIGSEGV, ended.stderr
    (finding,) = ended.report.findings
    assert finding.code == "HNG002"
    if not can_tell_late():
        pytest.skip("this kernel (before 6.15) tells only the parent how a process ended")
    assert "SIGSEGV" in finding.message
    assert ended.report.run.outcome is Outcome.KILLED


def test_room_for_the_report_is_set_aside_before_the_script_begins(tmp_path: Path) -> None:
    ended = run(
        tmp_path, "import os, sys\nprint(os.path.getsize(sys.argv[1] + '/report.reserve'))\n"
    )
    assert (ended.status, ended.stdout) == (0, f"{RESERVE_BYTES}\n"), ended.stderr


def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_monitor(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path, 0)
    run_dir.folder.mkdir()
    monitor = MonitorProcess(run_dir)
    assert not monitor.is_alive
    run_dir.monitor_pids.write_text(f"{os.getpid()} 1\n")
    assert not monitor.is_alive
    run_dir.monitor_pids.write_text("half of a li")
    assert not monitor.is_alive
