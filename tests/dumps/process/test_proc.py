"""Processes, seen from outside."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from distdiag.dumps.process import proc
from distdiag.dumps.process.proc import Process, read_process, wait_for_end, wait_for_pid_file

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]

KILLER = """
import os, pathlib, sys
from distdiag.dumps.process.proc import kill_families
kill_families([os.getppid(), 2**22])
pathlib.Path(sys.argv[1]).touch()
"""


def test_a_living_process_has_a_state_and_used_the_processor():
    reading = Process(os.getpid()).read()
    assert reading.state in "RS"
    assert reading.cpu_s > 0
    used = psutil.Process().cpu_times()
    assert reading.cpu_s == pytest.approx(used.user + used.system, abs=1.0)


def test_a_zombie_is_gone():
    with subprocess.Popen(SLEEP) as child:
        process = Process(child.pid)
        assert not process.is_gone
        child.kill()
        wait_for_end([process], 5)
        assert read_process(child.pid).state == "Z"
        assert process.is_gone
    assert read_process(child.pid) is None
    assert process.is_gone


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(3)", 3),
        ("import os; os._exit(0)", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_how_a_process_ended_is_seen_from_beside_it(code, status):
    with subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.2); {code}"]) as child:
        process = Process(child.pid)
        assert process.exit_status is None
        wait_for_end([process], 10)
        assert process.is_gone  # a zombie: its parent has not asked yet
        assert process.exit_status == status
    assert process.exit_status == status


def test_how_a_process_ended_is_seen_after_its_parent_has_asked_where_the_kernel_tells():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"]) as child:
        process = Process(child.pid)
        child.terminate()
        child.wait()
    known = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)
    assert process.exit_status == (-signal.SIGTERM if known else None)


def test_an_end_that_nobody_may_see_is_not_known(monkeypatch):
    monkeypatch.setattr(proc, "_PIDFD_GET_INFO", 0)  # what an older kernel says of it: ENOTTY
    with subprocess.Popen(SLEEP) as child:
        process = Process(child.pid)
        child.kill()
        child.wait()
    assert process.is_gone
    assert process.exit_status is None


def test_a_number_that_is_used_again_is_not_the_same_process():
    assert Process(os.getpid(), start_ticks=1).is_gone


def test_waiting_ends_at_once_when_a_process_ends():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as child:
        wait_for_end([Process(os.getpid()), Process(child.pid)], 3600)
        assert Process(child.pid).is_gone


def test_waiting_ends_when_the_time_is_over():
    begun = time.monotonic()
    wait_for_end([Process(os.getpid())], 0.2)
    assert time.monotonic() - begun > 0.15


def test_a_pid_file_that_is_missing_or_no_number_is_not_waited_for(tmp_path):
    # The time limit of the test is what ends it otherwise.
    wait_for_pid_file(tmp_path / "none", 3600)
    (tmp_path / "odd").write_text("x")
    wait_for_pid_file(tmp_path / "odd", 3600)
    assert (tmp_path / "odd").exists()


PARENT = f"""
import subprocess, sys, time
subprocess.Popen({SLEEP!r} + sys.argv[1:])
subprocess.run([sys.executable, "-c", {KILLER!r}] + sys.argv[1:])
time.sleep(100)
"""


def test_a_family_is_killed_but_not_the_member_that_kills_it(tmp_path):
    survived = tmp_path / "survived"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(survived)]) as parent:
        assert parent.wait(30) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while relatives := living_with(str(survived)):
        assert time.monotonic() < deadline, relatives
        time.sleep(0.05)
    assert survived.exists()


def living_with(argument):
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "status"])
        if argument in (process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
