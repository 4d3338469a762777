"""Stacks of real processes, and what is said where there are none."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from distdiag.dumps.base import StackSource, dump_ranks
from distdiag.dumps.process.proc import read_process
from distdiag.dumps.stacks.py_spy import PySpy, PySpyNative
from tests.dumps.observed_script import MOST_S, dump_at

SCRIPT = """
import json, threading, time
def wait_inside():
    print("ready", flush=True)
    {wait}
threading.Thread(target=lambda: time.sleep(100), name="background", daemon=True).start()
wait_inside()
"""


WAIT_LINE = 5


def comes_to(pid, state):
    """Wait until the kernel says that the process is in this state; False if it never is."""
    deadline = time.monotonic() + MOST_S
    while read_process(pid).state != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return read_process(pid).state == state


@contextmanager
def running(path, wait):
    path.write_text(SCRIPT.format(wait=wait))
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(100)",
        "while True: pass",
        # Loaded this way, a C function keeps the GIL while it sleeps.
        "import ctypes; ctypes.PyDLL(None).sleep(100)",
    ],
    ids=["asleep", "busy", "holding the GIL"],
)
def test_a_dump_shows_the_users_line_whatever_the_process_does(tmp_path, wait):
    script = tmp_path / "train.py"
    with running(script, wait) as process:
        stacks = dump_at(PySpy(str(script)), process, WAIT_LINE)
    assert (stacks.rank, stacks.error, stacks.source) == (0, "", "py-spy")
    main = stacks.threads[0]
    assert main.name == "MainThread"
    assert main.frames[0].function == "wait_inside"
    assert (main.frames[0].file, main.frames[0].line) == (str(script), WAIT_LINE)
    assert main.frames[0].user
    (background,) = [thread for thread in stacks.threads if thread.name == "background"]
    outermost = background.frames[-1]
    assert (outermost.function, outermost.user) == ("_bootstrap", False)


def test_a_process_that_is_gone_is_said_to_be_gone():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert PySpy(None).dump(process.pid, 0, 5.0).error == "the process is gone"


def test_native_frames_stand_among_those_of_python(tmp_path):
    script = tmp_path / "train.py"
    with running(script, "import ctypes; ctypes.PyDLL(None).sleep(100)") as process:
        dump_at(PySpy(str(script)), process, WAIT_LINE)
        stacks = PySpyNative(str(script)).dump(process.pid, 3, 60.0)
        assert (stacks.rank, stacks.error, stacks.source) == (3, "", "py-spy-native")
        frames = stacks.threads[0].frames
        assert (stacks.threads[0].name, frames[0].user) == ("MainThread", False)
        assert "nanosleep" in frames[0].function
        (user,) = [frame for frame in frames if frame.function == "wait_inside"]
        assert (user.file, user.line, user.user) == (str(script), WAIT_LINE, True)
        # The process goes on.
        assert process.poll() is None


@pytest.mark.parametrize("timeout_s", [0.01, 0.05, 0.1, 0.2])
def test_a_native_pass_that_takes_too_long_leaves_the_process_running(tmp_path, timeout_s):
    script = tmp_path / "train.py"
    body = "\n    ".join(["import sys", "for line in sys.stdin: print(int(line) + 1, flush=True)"])
    script.write_text(SCRIPT.format(wait=body))
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        stacks = PySpyNative(None).dump(process.pid, 0, timeout_s)
        assert stacks.error in ("", f"py-spy gave no answer within {timeout_s:.3g} s")
        process.stdin.write("41\n")
        process.stdin.flush()
        assert process.stdout.readline() == "42\n"
        process.kill()


def test_a_native_pass_leaves_a_process_stopped_that_was_stopped(tmp_path):
    with running(tmp_path / "train.py", "time.sleep(100)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert comes_to(process.pid, "T")
        PySpyNative(None).dump(process.pid, 0, 0.05)
        # When py-spy is killed the kernel wakes the process, which then stops again.
        assert comes_to(process.pid, "T")


def test_a_native_pass_that_fails_is_reported():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert PySpyNative(None).dump(process.pid, 0, 5.0).error == "the process is gone"


def test_a_process_that_is_not_python_is_an_error_in_one_line():
    with subprocess.Popen(["sleep", "100"]) as process:
        error = PySpy(None).dump(process.pid, 0, 5.0).error
        process.kill()
    assert error.startswith("py-spy ended with status 1: ")
    assert "\n" not in error


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("sleep 100 #", "py-spy gave no answer within 0.5 s"),
        (
            "echo 'Error: Permission Denied: try again with sudo' >&2; exit 1 #",
            "ptrace is forbidden",
        ),
        ("echo nonsense #", "JSON is malformed"),
        ("echo '[]' #", "py-spy saw no thread"),
        ("echo '[{\"frames\": 3}]' #", "Expected `array`, got `int`"),
    ],
)
def test_every_failure_is_reported(tmp_path, program, expected):
    fake = tmp_path / "py-spy"
    fake.write_text(f"#!/bin/sh\nexec 3>&-\n{program}\n")
    fake.chmod(0o755)
    stacks = PySpy(None, program=str(fake)).dump(1, 0, 0.5)
    assert expected in stacks.error
    assert stacks.threads == ()


def test_a_missing_program_is_reported(tmp_path):
    assert "No such file" in PySpy(None, program=str(tmp_path / "none")).dump(1, 0, 1.0).error


class SlowSource(StackSource):
    name = "slow"

    def dump(self, pid, rank, timeout_s):
        time.sleep(0.3)
        return self.stacks(rank, error=f"pid {pid}, {timeout_s} s")


def test_several_ranks_are_dumped_at_once():
    everyone = threading.Barrier(8, timeout=60)

    class TogetherSource(SlowSource):
        def dump(self, pid, rank, timeout_s):
            everyone.wait()  # breaks unless all eight are here at the same time
            return self.stacks(rank, error=f"pid {pid}, {timeout_s} s")

    dumps = dump_ranks(TogetherSource(), {rank: rank + 100 for rank in range(8)}, timeout_s=10)
    assert [dump.error for dump in dumps] == [f"pid {rank + 100}, 10.0 s" for rank in range(8)]


def test_many_ranks_share_the_time():
    dumps = dump_ranks(SlowSource(), {rank: 0 for rank in range(9)}, timeout_s=10)
    assert {dump.error for dump in dumps} == {"pid 0, 5.0 s"}
    assert dump_ranks(SlowSource(), {}, timeout_s=10) == ()
