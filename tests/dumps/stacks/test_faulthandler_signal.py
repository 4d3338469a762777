"""Stacks that ranks write themselves, and what is said where they cannot."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from distdiag.dumps.process.proc import read_process, signal_mask
from distdiag.dumps.stacks.faulthandler_signal import FaulthandlerSignal
from distdiag.record.run_dir import RunDir, StackSignal
from tests.dumps.observed_script import dump_at, observed_script

# Loaded this way, a C function keeps the GIL.
HOLD = "libc = ctypes.PyDLL(None)"


def line_of(script, text):
    lines = script.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    "body",
    ["time.sleep(100)", "while True: pass", "ctypes.PyDLL(None).sleep(100)"],
    ids=["asleep", "busy", "holding the GIL"],
)
def test_the_users_line_is_shown_whatever_the_process_does(tmp_path, body):
    with observed_script(tmp_path, body) as (process, run_dir, script):
        source = FaulthandlerSignal(run_dir, str(script))
        for _ in range(2):
            stacks = dump_at(source, process, line_of(script, body))
            assert (stacks.rank, stacks.error, stacks.source) == (0, "", "faulthandler")
            assert [thread.name for thread in stacks.threads[:1]] == ["MainThread"]
            assert sorted(thread.name for thread in stacks.threads) == [
                "MainThread",
                "background",
                "distdiag",
            ]
            main = stacks.threads[0].frames[0]
            assert (main.file, main.function, main.user) == (str(script), "wait_inside", True)
            assert main.line == line_of(script, body)
            (background,) = [t for t in stacks.threads if t.name == "background"]
            assert not background.frames[-1].user
        assert process.poll() is None


def test_no_system_call_of_the_script_is_interrupted(tmp_path):
    body = f"{HOLD}; print(libc.poll(None, 0, 6000), flush=True)"
    with observed_script(tmp_path, body) as (process, run_dir, script):
        source = FaulthandlerSignal(run_dir, str(script))
        stacks = dump_at(source, process, line_of(script, "libc.poll"))
        assert stacks.error == ""
        assert stacks.threads[0].frames[0].line == line_of(script, "libc.poll")
        # An interrupted poll would have returned -1.
        assert process.stdout.read() == "0\n"
        assert process.wait() == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("sabotage", "expected"),
    [
        ("faulthandler.unregister(probe._signal)", "no longer handles signal"),
        ("os.dup2(0, probe._file.number)", "the rank's file for stacks is no longer open"),
        ("os.close(probe._file.number)", "the rank's file for stacks is no longer open"),
    ],
)
def test_the_signal_is_not_sent_where_it_could_do_harm(tmp_path, sabotage, expected):
    body = f"{HOLD}; {sabotage}; libc.sleep(100)"
    with observed_script(tmp_path, body) as (process, run_dir, _):
        stacks = FaulthandlerSignal(run_dir, None).dump(process.pid, 0, 10.0)
        assert expected in stacks.error
        assert stacks.threads == ()
        assert read_process(process.pid).state == "S"


def test_a_stopped_process_is_said_not_to_have_answered(tmp_path):
    with observed_script(tmp_path, "time.sleep(100)") as (process, run_dir, _):
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until all its threads have stopped
        error = FaulthandlerSignal(run_dir, None).dump(process.pid, 0, 3.0).error
        assert error == "the rank did not write its stacks in time"
        os.kill(process.pid, signal.SIGCONT)
        # What comes late belongs to no later dump.
        stacks = FaulthandlerSignal(run_dir, None).dump(process.pid, 0, 20.0)
        assert stacks.error == ""
        assert stacks.threads[0].frames[0].function == "wait_inside"


def test_a_process_that_is_gone_is_said_to_be_gone(tmp_path):
    with observed_script(tmp_path, "pass") as (process, run_dir, _):
        process.wait()
        error = FaulthandlerSignal(run_dir, None).dump(process.pid, 0, 5.0).error
        assert error == "the rank's background thread has ended"
        assert process.stderr.read() == ""


def test_another_process_gets_no_signal(tmp_path):
    with observed_script(tmp_path, "time.sleep(100)") as (_, run_dir, _script):
        error = FaulthandlerSignal(run_dir, None).dump(os.getpid(), 0, 5.0).error
        assert error == "another process of the rank has prepared the signal"


def test_what_is_missing_or_damaged_is_reported(tmp_path):
    run_dir = RunDir(tmp_path, 0)
    run_dir.folder.mkdir()
    source = FaulthandlerSignal(run_dir, None)
    assert source.dump(1, 0, 1.0).error == "the rank has prepared no signal for its stacks"
    run_dir.stack_signal(0).write_text('{"pid": 1')
    error = source.dump(1, 0, 1.0).error
    assert error.startswith(f"{run_dir.stack_signal(0)} is damaged: ")
    told = StackSignal(pid=1, thread=1, signal=50, descriptor=9, names={})
    run_dir.stack_signal(0).write_bytes(msgspec.json.encode(told))
    assert "No such file" in source.dump(1, 0, 1.0).error


def test_masks_of_signals_are_read():
    code = "import signal; signal.signal(50, print); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert signal_mask(process.pid, "SigCgt") & (1 << 49)
        assert not signal_mask(process.pid, "SigBlk", process.pid) & (1 << 49)
        process.kill()
    assert signal_mask(process.pid, "SigCgt") == 0
