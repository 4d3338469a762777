"""What debuggers print of all threads of a process."""

import shutil
import subprocess
import sys

import pytest

from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.native_text import NativeText
from tests.dumps.reading import events, lines_of, read, sample, text

SCRIPT = """
import threading, time
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("ready", flush=True)
time.sleep(100)
"""


def test_gdb_lists_all_threads_and_number_1_is_the_main_one():
    (dump,) = read(NativeText(), sample("gdb.txt"))
    assert (dump.rank, dump.pid) == (None, 6250)
    main, other = dump.events[0].threads
    assert (main.name, other.name) == ("MainThread", "python 6252")
    assert lines_of(main)[:2] == [
        "clock_nanosleep.c:48 __GI___clock_nanosleep",
        "timemodule.c:2159 pysleep",
    ]
    assert lines_of(other)[-1] == "clone3.S:81 clone3"
    assert (len(main.frames), len(other.frames)) == (24, 25)
    assert not any(frame.user for frame in (*main.frames, *other.frames))


def test_eu_stack_names_the_process():
    (dump,) = read(NativeText(), sample("eu_stack.txt"))
    assert dump.pid == 6250
    main, other = dump.events[0].threads
    assert (main.name, other.name) == ("MainThread", "thread 6252")
    assert main.frames[1].function == "time_sleep"
    assert other.frames[-1].function == "__clone3"


@pytest.mark.parametrize(
    ("line", "file", "number", "function"),
    [
        ("#0  0x00007f12 in poll () from /lib64/libc.so.6", "/lib64/libc.so.6", 0, "poll"),
        ("#1  main (argc=1, f=0x1 <foo(int)>) at ./a b/main.c:12", "", 0, "main"),
        ("#1  main (argc=1, f=0x1 <foo(int)>) at ./main.c:12", "./main.c", 12, "main"),
        (
            "#2  0x00007f in std::function<void ()>::operator()() const (this=0x1) at /usr/f.h:590",
            "/usr/f.h",
            590,
            "std::function<void ()>::operator()() const",
        ),
        (
            "#3  0x00007f in c10d::WorkNCCL::wait(std::chrono::duration<long>) () "
            "from /opt/torch/lib/libtorch_cuda.so",
            "/opt/torch/lib/libtorch_cuda.so",
            0,
            "c10d::WorkNCCL::wait(std::chrono::duration<long>)",
        ),
        ("#4  0x0000000000000000 in ?? ()", "", 0, "??"),
        ("#5  <signal handler called>", "", 0, "<signal handler called>"),
        ("#6  0x00007f12 - 1 poll - /usr/lib64/libc.so.6", "/usr/lib64/libc.so.6", 0, "poll"),
    ],
)
def test_a_frame(line, file, number, function):
    dump = text("Thread 1 (Thread 0x7f (LWP 12)):", line)
    (stacks,) = events(NativeText(), dump)[None]
    (frame,) = stacks.threads[0].frames
    assert (frame.file, frame.line, frame.function, frame.user) == (file, number, function, False)


def test_python_frames_of_py_bt_are_the_users():
    dump = text(
        "Thread 1 (LWP 12):",
        "Traceback (most recent call first):",
        "  <built-in method acquire of _thread.lock object at remote 0x7f>",
        '  File "/home/me/train.py", line 10, in step',
        "    lock.acquire()",
        '  File "/home/me/train.py", line 20, in <module>',
    )
    (stacks,) = events(NativeText(), dump)[None]
    assert lines_of(stacks.threads[0]) == ["train.py:10 step", "train.py:20 <module>"]
    assert stacks.threads[0].frames[0].user


def test_a_single_stack_without_a_head_is_the_main_threads():
    (stacks,) = events(NativeText(), text("#0  0x00007f12 in poll () from /lib/libc.so.6"))[None]
    assert [thread.name for thread in stacks.threads] == ["MainThread"]


def test_several_processes_in_one_file_stay_apart():
    for name, pids in (("gdb.txt", [6250, 7250]), ("eu_stack.txt", [6250, 7250])):
        one = sample(name).data
        both = one + one.replace(b"625", b"725")
        assert [dump.pid for dump in read(NativeText(), Dump(path="a", data=both))] == pids


@pytest.mark.parametrize(
    "command",
    [["gdb", "-batch", "-nx", "-ex", "thread apply all bt", "-p"], ["eu-stack", "-p"]],
    ids=["gdb", "eu-stack"],
)
def test_a_real_process_is_read(command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            done = subprocess.run(
                [*command, str(process.pid)], capture_output=True, timeout=100, check=False
            )
        finally:
            process.kill()
    (dump,) = read(NativeText(), Dump(path="a", data=done.stdout))
    assert dump.pid == process.pid
    assert [thread.name == "MainThread" for thread in dump.events[0].threads] == [True, False]
    assert any("sleep" in frame.function for frame in dump.events[0].threads[0].frames)
