"""What a process waits for, and who has it, of real processes that stand still."""

import fcntl
import os
import platform
import signal
import sys

import pytest

from distdiag.dumps.process.holders import AskedFiles, Holders, Owner, parse_owner
from distdiag.dumps.process.kernel import read_blocked_call
from distdiag.dumps.stacks.py_spy import PySpy
from distdiag.events.base import CallSite, Frame
from distdiag.events.files import FileAccess, FileAction
from tests.dumps.programs import running, until

SLEEP = "import sys, time; print('ready', flush=True); time.sleep(100)"
LOCK = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
print("ready", flush=True)
fcntl.flock(file, fcntl.LOCK_EX)
"""
SITE = CallSite((Frame("train.py", 7, "main"),))


def holders(*pids, main_script=None):
    ranks = dict(enumerate(pids))
    return Holders(lambda: ranks, PySpy(main_script))


def look(source, process, rank=0):
    seen = source.observe_rank(rank, process.pid, 5.0)
    assert seen.error == ""
    return seen


def access(action, path, **values):
    return FileAccess(
        rank=0, seq=0, time_ns=0, action=action, path=str(path), written="", site=SITE, **values
    )


def holding(seen):
    return [(each.pid, each.rank) for each in seen.processes if each.has_it]


def test_a_lock_of_another_process(tmp_path):
    path = tmp_path / "cache.lock"
    holder = f"import fcntl; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)\n{SLEEP}"
    with running(holder) as owner, running(LOCK, path) as waiter:
        source = holders(waiter.pid)
        seen = until(lambda: look(source, waiter), holding)
    assert (seen.values["waits_for"], seen.values["name"]) == ("lock", str(path))
    assert holding(seen) == [(owner.pid, None)]
    (who,) = seen.processes
    assert who.command.startswith(sys.executable)
    assert "sleeping" in who.doing
    assert [thread.frames[0].function for thread in who.threads] == ["<module>"]
    assert seen.summary.startswith(f"{path} is locked by process {owner.pid} (")


def test_a_lock_of_another_rank_and_one_that_was_inherited(tmp_path):
    path = tmp_path / "cache.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with running(SLEEP, pass_fds=[file.fileno()]) as other, running(LOCK, path) as waiter:
            file.close()
            source = holders(waiter.pid, other.pid)
            seen = until(lambda: look(source, waiter), holding)
    assert holding(seen) == [(other.pid, 1)]
    assert seen.values["locked_by_pid"] == os.getpid()
    assert seen.processes[0].threads == ()  # a rank's stacks are taken anyway


def test_a_terminal_and_a_pipe_on_the_standard_input():
    code = "import os, sys; print('ready', flush=True); os.read(0, 1)"
    _, terminal = os.openpty()
    with running(code, stdin=terminal) as process:
        name = os.ttyname(terminal)
        seen = until(lambda: look(holders(), process), lambda seen: seen.values)
    assert seen.values == {"waits_for": "terminal", "name": name}
    reader, writer = os.pipe()
    with running(code, stdin=reader) as process:
        os.close(reader)
        source = holders(process.pid)
        seen = until(lambda: look(source, process), lambda seen: seen.values)
    os.close(writer)
    assert (seen.values["waits_for"], seen.values["is_own"]) == ("input", False)


def test_a_pipe_of_which_nobody_else_has_the_other_end():
    code = "import os, sys; r, w = os.pipe(); print('ready', flush=True); os.read(r, 1)"
    with running(code) as process:
        source = holders(process.pid)
        seen = until(lambda: look(source, process), lambda seen: seen.values)
    assert (seen.values["waits_for"], seen.values["is_own"]) == ("pipe", True)
    assert holding(seen) == []


def test_children_alive_and_dead():
    code = (
        "import subprocess, sys\n"
        "dead = subprocess.Popen([sys.executable, '-c', 'import sys; sys.exit(3)'])\n"
        "alive = subprocess.Popen(['sleep', '98'])\n"
        "print('ready', flush=True)\nalive.wait()"
    )
    with running(code) as process:
        seen = until(
            lambda: look(holders(process.pid), process),
            lambda seen: any(each.exit_status for each in seen.processes),
        )
    dead, alive = seen.processes
    assert (dead.exit_status, dead.parent_rank) == (3, 0)
    assert (alive.command, alive.exit_status, alive.parent_rank) == ("sleep 98", None, 0)
    assert not alive.is_forked


def test_a_forked_child_is_seen_with_its_stack():
    code = (
        "import os, threading\nlock = threading.Lock()\nlock.acquire()\n"
        "pid = os.fork()\n"
        "if not pid:\n    lock.acquire()\n"
        "print('ready', flush=True)\nos.waitpid(pid, 0)"
    )
    with running(code) as process:
        source = holders(process.pid)
        seen = until(lambda: look(source, process), lambda seen: "futex" in seen.processes[0].doing)
    (child,) = seen.processes
    assert child.is_forked
    assert child.threads[0].frames[0].line == 6


POLL = "import sys, time; print('ready', flush=True)\nwhile True: time.sleep(0.05)"


def polled(path, **values):
    """What is seen of a process that polls for a path."""
    with running(POLL) as process:
        source = holders(process.pid)
        source.asked.feed(access(FileAction.WRITE, path, is_exclusive=True))
        return until(lambda: look(source, process), lambda seen: seen.values)


def test_a_process_that_waits_elsewhere_does_not_ask_for_a_file(tmp_path):
    code = "import threading; print('ready', flush=True); threading.Event().wait()"
    with running(code) as process:
        source = holders(process.pid)
        source.asked.feed(access(FileAction.WRITE, tmp_path / "lock", is_exclusive=True))
        until(lambda: read_blocked_call(process.pid), lambda call: call.name == "futex")
        assert look(source, process).values == {}


def test_a_lock_file_that_is_left_over(tmp_path):
    path = tmp_path / "lock"
    assert polled(path).values["waits_for"] == "file"
    path.touch()
    seen = polled(path)
    assert (seen.values["waits_for"], seen.processes) == ("lock-file", ())
    assert (seen.values["asked_file"], seen.values["asked_line"]) == ("train.py", 7)
    assert seen.values["asked_by"] == "train.py:main"
    assert 0 <= seen.values["age_s"] < 60
    assert "owner_pid" not in seen.values


def test_a_folder_that_is_listed_again_and_again(tmp_path):
    with running(POLL) as process:
        source = holders(process.pid)
        source.asked.feed(access(FileAction.TEST, tmp_path))
        source.asked.feed(access(FileAction.LIST, tmp_path))
        seen = until(lambda: look(source, process), lambda seen: seen.values)
    assert (seen.values["waits_for"], seen.values["name"]) == ("folder", str(tmp_path))


def test_a_folder_is_no_lock_file(tmp_path):
    with running(POLL) as process:
        source = holders(process.pid)
        source.asked.feed(access(FileAction.TEST, tmp_path))
        until(lambda: read_blocked_call(process.pid), lambda call: "nanosleep" in call.name)
        assert look(source, process).values == {}


@pytest.mark.parametrize("host", [platform.node(), "node-7"])
def test_a_lock_file_names_its_owner(tmp_path, host):
    path = tmp_path / "lock"
    with running(SLEEP) as owner:
        path.write_text(f"{owner.pid}\n{host}\n")
        seen = polled(path)
    assert (seen.values["owner_pid"], seen.values["owner_host"]) == (owner.pid, host)
    assert bool(holding(seen)) is (host == platform.node())


def test_a_lock_that_is_polled_for(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # This process is the one that looks, so it cannot be the one that is found.
        with running(SLEEP, pass_fds=[file.fileno()]) as owner:
            file.close()
            seen = polled(path)
    assert seen.values["waits_for"] == "lock"
    assert holding(seen) == [(owner.pid, None)]


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("", Owner()),
        ("4711\n", Owner(4711)),
        ("4711\nnode-7\n26413422213269862\n", Owner(4711, "node-7")),
        ("filelock/2\nmode=exclusive\npid=12\nhost=gpu.local\n", Owner(12, "gpu.local")),
        ("built by make\n", Owner()),
        ("0\n", Owner()),
    ],
)
def test_whom_a_lock_file_names(text, owner):
    assert parse_owner(text) == owner


def test_the_file_that_was_asked_for_from_the_last_line():
    asked = AskedFiles()
    asked.feed(access(FileAction.TEST, "/data/old"))
    line = CallSite((Frame("filelock.py", 1, "acquire", user=False), Frame("train.py", 9, "main")))
    asked.feed(_at(line, "/data"))
    asked.feed(_at(line, "/data/new.lock", FileAction.WRITE, is_exclusive=True))
    asked.feed(_at(line, "/data/other", thread="reader"))
    assert asked.last(0).path == "/data/new.lock"
    assert asked.last(1) is None


def _at(site, path, action=FileAction.TEST, **values):
    return FileAccess(
        rank=0, seq=0, time_ns=0, action=action, path=path, written="", site=site, **values
    )


def test_of_a_process_that_is_gone_nothing_is_reported():
    with running(SLEEP) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert holders().observe_rank(0, process.pid, 1.0).error == "the process is gone"
