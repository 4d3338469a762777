"""The text of py-spy, as samples and from a real process."""

import subprocess
import sys

from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.py_spy import _find_program
from distdiag.dumps.stacks.py_spy_text import PySpyText
from tests.dumps.reading import events, lines_of, read, sample, text

SCRIPT = """
import threading, time
def wait_inside():
    time.sleep(100)
threading.Thread(target=lambda: time.sleep(100), name="loader (1)", daemon=True).start()
print("ready", flush=True)
wait_inside()
"""


def test_a_dump_is_stacks_of_one_process_with_the_main_thread_first():
    (dump,) = read(PySpyText(), sample("py_spy.txt"))
    assert (dump.rank, dump.pid) == (None, 6250)
    main, loader = dump.events[0].threads
    assert (main.name, loader.name) == ("MainThread", "loader")
    assert lines_of(main) == [
        "hang.py:12 train",
        "hang.py:4 train",
        "hang.py:4 train",
        "hang.py:13 <module>",
    ]
    assert [frame.user for frame in loader.frames] == [False, False, True, False, False, False]
    assert loader.frames[0].function == "wait"


def test_local_variables_are_no_frames():
    (plain,) = read(PySpyText(), sample("py_spy.txt"))
    (locals_,) = read(PySpyText(), sample("py_spy_locals.txt"))
    assert locals_.events == plain.events


def test_native_frames_stand_among_the_others_and_are_nobodys():
    (dump,) = read(PySpyText(), sample("py_spy_native.txt"))
    main = dump.events[0].threads[0]
    assert lines_of(main)[:3] == [
        "libc.so.6:0 clock_nanosleep",
        "libpython3.11.so.1.0:0 time_sleep",
        "hang.py:12 train",
    ]
    assert [frame.user for frame in main.frames] == [False, False, True, True, True, True, False]


def test_who_holds_the_gil_is_read():
    dump = text(
        'Thread 12 (active+gil): "MainThread"',
        "    f (a.py:1)",
        'Thread 0x7F (idle): "x"',
        "    g (b.py:2)",
    )
    (stacks,) = events(PySpyText(), dump)[None]
    assert [(t.name, t.holds_gil, t.active) for t in stacks.threads] == [
        ("MainThread", True, True),
        ("x", False, False),
    ]


def test_several_processes_in_one_file_stay_apart():
    one = sample("py_spy.txt").data
    both = Dump(path="all.txt", data=one + one.replace(b"6250", b"7000"))
    assert [dump.pid for dump in read(PySpyText(), both)] == [6250, 7000]


def test_prefixes_of_a_launcher_tell_the_rank():
    both = [
        f"[rank{rank}]: {line}"
        for rank in (0, 3)
        for line in ('Thread 12 (idle): "MainThread"', f"    step (train.py:{rank + 1})")
    ]
    by_rank = events(PySpyText(), text(*both))
    assert {rank: lines_of(found[0].threads[0]) for rank, found in by_rank.items()} == {
        0: ["train.py:1 step"],
        3: ["train.py:4 step"],
    }


def test_the_dump_of_a_real_process_is_read(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            said = subprocess.run(
                [_find_program(), "dump", "--full-filenames", "--pid", str(process.pid)],
                capture_output=True,
                check=True,
                timeout=60,
            ).stdout
        finally:
            process.kill()
    (dump,) = read(PySpyText(), Dump(path="dump.txt", data=said))
    assert dump.pid == process.pid
    main, loader = dump.events[0].threads
    assert (main.name, loader.name) == ("MainThread", "loader (1)")
    assert {frame.file for frame in main.frames if frame.user} == {str(script)}
    assert main.frames[-1].function == "<module>"
