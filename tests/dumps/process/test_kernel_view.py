"""What the kernel says of real processes that are stuck in several ways."""

import os
import signal
import socket
import sys

import pytest

from distdiag.dumps.process.kernel import KernelView, read_blocked_call
from distdiag.dumps.process.memory import read_cgroup_memory
from tests.dumps.observed_script import REPOSITORY
from tests.dumps.programs import running, until

READY = "import sys; print('ready', flush=True)\n"


def look(process):
    return KernelView().observe_rank(3, process.pid, 5.0)


def test_a_read_on_a_pipe_that_nobody_writes_names_the_pipe(tmp_path):
    fifo = tmp_path / "samples fifo"
    os.mkfifo(fifo)
    code = "import sys; f = open(sys.argv[1], 'r+b', 0)\n" + READY + "f.read(1)"
    with running(code, fifo) as process:
        observed = until(lambda: look(process), lambda seen: "syscall" in seen.values)
    assert (observed.rank, observed.source, observed.error) == (3, "kernel", "")
    values = observed.values
    assert (values["state"], values["syscall"], values["blocked_on"]) == ("S", "read", str(fifo))
    assert observed.summary.startswith(f"the main thread is sleeping in read of {fifo} (")
    assert values["num_threads"] == 1
    assert values["num_children"] == 0
    assert 1 << 20 < values["rss_bytes"] < 1 << 30
    assert 0 <= values["oom_score"] <= 2000
    assert "tracer_pid" not in values


@pytest.mark.parametrize("way", ["whole", "below a folder", "below an open folder"])
def test_the_opening_of_a_pipe_that_nobody_writes_names_the_pipe(tmp_path, way):
    os.mkfifo(tmp_path / "samples")
    opened = {
        "whole": f"os.open({str(tmp_path / 'samples')!r}, os.O_RDONLY)",
        "below a folder": "os.open('samples', os.O_RDONLY)",
        "below an open folder": "os.open('samples', os.O_RDONLY, dir_fd=folder)",
    }[way]
    code = f"import os\nfolder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
    code += "os.chdir(folder)\n" if way == "below a folder" else ""
    with running(code + READY + opened) as process:
        observed = until(lambda: look(process), lambda seen: "syscall" in seen.values)
    assert observed.values["syscall"] == "openat"
    assert observed.values["blocked_on"] == str(tmp_path / "samples")


def test_no_memory_is_read_beside_a_thread_that_may_hold_its_lock(tmp_path):
    os.mkfifo(tmp_path / "samples")
    code = (
        "import ctypes, os, threading, time\n"
        "libc = ctypes.CDLL(None)\n"
        "def wait():\n"
        "    if not libc.vfork():\n"  # the parent's thread is in uninterruptible sleep meanwhile
        "        libc.sleep(100)\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    with running(code + READY + f"os.open({str(tmp_path / 'samples')!r}, os.O_RDONLY)") as process:
        observed = until(
            lambda: look(process),
            lambda seen: (
                "uninterruptible_threads" in seen.values and seen.values.get("syscall") == "openat"
            ),
        )
    assert "blocked_on" not in observed.values


def test_a_lock_on_a_file_names_the_file_and_its_file_system(tmp_path):
    path = tmp_path / "extensions.lock"
    code = (
        "import fcntl, os, sys\n"
        "first, second = (os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(2))\n"
        "fcntl.flock(first, fcntl.LOCK_EX)\n" + READY + "fcntl.flock(second, fcntl.LOCK_EX)"
    )
    with running(code, path) as process:
        call = until(lambda: read_blocked_call(process.pid), lambda call: call.name)
    assert (call.name, call.target) == ("flock", str(path))
    assert call.file_system
    assert str(call) == f"flock of {path} ({call.file_system})"


def test_a_socket_is_reported_by_its_two_ends():
    code = (
        "import socket, sys\n"
        "peer = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        + READY
        + "peer.recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with running(code, port) as process:
            peer, (_, peer_port) = server.accept()
            call = until(lambda: read_blocked_call(process.pid), lambda call: call.name)
            peer.close()
    expected = f"the connection from 127.0.0.1:{peer_port} to 127.0.0.1:{port}"
    assert (call.name, call.target) == ("recvfrom", expected)


def test_a_lock_between_threads_is_a_futex():
    code = "import threading\nlock = threading.Lock()\nlock.acquire()\n" + READY + "lock.acquire()"
    with running(code) as process:
        observed = until(lambda: look(process), lambda seen: "syscall" in seen.values)
    assert observed.values["syscall"] == "futex"
    assert "blocked_on" not in observed.values


def test_a_process_that_computes_is_running():
    with running(READY + "while True: pass") as process:
        observed = until(lambda: look(process), lambda seen: seen.values["state"] == "R")
    assert observed.summary == "the main thread is running"
    assert "syscall" not in observed.values


def test_a_stopped_process_is_reported():
    with running(READY + "import time; time.sleep(100)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        observed = until(lambda: look(process), lambda seen: seen.values["state"] == "T")
    assert observed.summary.startswith("the main thread is stopped by a signal")


# A parent waits for a child of vfork as it would wait for a disk.
UNINTERRUPTIBLE = """
import ctypes, os, sys
libc = ctypes.PyDLL(None)
os.write(1, b"ready\\n")
if not libc.vfork():
    libc.sleep(100)
"""


def test_uninterruptible_sleep_is_reported():
    with running(UNINTERRUPTIBLE) as process:
        observed = until(lambda: look(process), lambda seen: seen.values["state"] == "D")
    assert "in uninterruptible sleep" in observed.summary
    assert observed.summary.endswith("; mostly a file system or a device that does not answer")


def test_a_thread_in_uninterruptible_sleep_is_reported():
    code = (
        "import ctypes, os, threading, time\n"
        "libc = ctypes.CDLL(None)\n"
        "def stuck():\n    if not libc.vfork(): libc.sleep(100)\n"
        "threading.Thread(target=stuck, daemon=True).start()\n" + READY + "time.sleep(100)"
    )
    with running(code) as process:
        observed = until(
            lambda: look(process), lambda seen: "uninterruptible_threads" in seen.values
        )
    assert "in uninterruptible sleep" in observed.values["uninterruptible_threads"]
    assert "; the thread " in observed.summary


def test_workers_are_listed_with_what_they_do_and_those_in_trouble_first(tmp_path):
    fifo = tmp_path / "shard"
    os.mkfifo(fifo)
    code = (
        "import os, sys, time\n"
        "if not os.fork(): open(sys.argv[1], 'r+b', 0).read(1)\n"
        "if not (dead := os.fork()): os._exit(0)\n"
        "os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)\n" + READY + "time.sleep(100)"
    )
    with running(code, fifo) as process:
        observed = until(
            lambda: look(process),
            lambda seen: any(str(fifo) in str(value) for value in seen.values.values()),
        )
    assert observed.values["num_children"] == 2
    dead, stuck = (name for name in observed.values if name.startswith("child "))
    assert observed.values[dead].endswith(": dead, and not yet waited for by its parent")
    assert f": sleeping in read of {fifo}" in observed.values[stuck]
    assert observed.summary.endswith("is dead, and not yet waited for by its parent")


LOOK_AT_PARENT = """
import os, subprocess
from distdiag.dumps.process.kernel import KernelView
with subprocess.Popen(["sleep", "100"]) as child:
    print(KernelView().observe_rank(0, os.getppid(), 5.0).values["num_children"])
    child.kill()
"""


def test_a_monitor_that_is_a_child_does_not_tell_of_itself():
    code = (
        "import subprocess, sys\n"
        "other = subprocess.Popen(['sleep', '100'])\n" + READY + "subprocess.run(sys.argv[1:])"
    )
    with running(code, sys.executable, "-c", LOOK_AT_PARENT, cwd=REPOSITORY) as process:
        assert process.stdout.readline() == "1\n"


def test_a_debugger_is_reported():
    code = (
        "import ctypes, sys, time\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.ptrace(16, int(sys.argv[1]), 0, 0) == 0\n" + READY + "time.sleep(100)"
    )
    with running(READY + "import time; time.sleep(100)") as process:
        with running(code, process.pid) as debugger:
            observed = until(lambda: look(process), lambda seen: seen.values["state"] == "t")
        assert observed.values["tracer_pid"] == debugger.pid
        assert observed.values["doing"].startswith("stopped by a debugger")


def test_a_process_that_is_gone_is_said_to_be_gone():
    with running(READY) as process:
        process.wait()
    assert look(process).error == "the process is gone"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (
            "0::/job/rank",
            {
                "job/rank/memory.current": "700",
                "job/rank/memory.max": "max",
                "job/memory.max": "1000",
                "job/memory.current": "900",
                "job/rank/memory.events": "low 0\noom 3\noom_kill 2\n",
            },
            {"memory_used_bytes": 700, "memory_limit_bytes": 1000, "oom_kills": 2},
        ),
        (
            "5:cpu,cpuacct:/x\n4:memory:/job\n0::/",
            {
                "memory/job/memory.usage_in_bytes": "5",
                "memory/job/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            {"memory_used_bytes": 5},
        ),
        (
            "0::/host/path/of/the/container",
            {"memory.current": "700", "memory.max": "800"},
            {"memory_used_bytes": 700, "memory_limit_bytes": 800},
        ),
        ("0::/", {"memory.max": "800"}, {}),
        ("", {}, {}),
    ],
    ids=["second version", "first version", "within a container", "root of the host", "none"],
)
def test_the_memory_of_a_container_is_read(tmp_path, groups, files, expected):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_cgroup_memory(groups, tmp_path) == expected
