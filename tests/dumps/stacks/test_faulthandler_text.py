"""What faulthandler prints, as samples and from real processes."""

import subprocess
import sys

from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.faulthandler_text import FaulthandlerText
from distdiag.events.lifecycle import Exited
from distdiag.events.stacks import Stacks
from tests.dumps.reading import events, lines_of, sample, text

MAIN = ["hang.py:12 train", "hang.py:4 train", "hang.py:4 train", "hang.py:13 <module>"]


def only(name):
    (found,) = events(FaulthandlerText(), sample(name)).values()
    return found


def test_a_signal_shows_all_threads_and_the_main_thread_first():
    (stacks,) = only("faulthandler_signal.txt")
    main, other = stacks.threads
    assert (main.name, main.active) == ("MainThread", True)
    assert lines_of(main) == MAIN
    assert (other.name, other.active) == ("thread 0x00007f239cf646c0", False)
    assert lines_of(other)[2] == "hang.py:2 waiter"
    assert [frame.user for frame in other.frames] == [False, False, True, False, False, False]


def test_a_timeout_knows_no_current_thread_and_the_main_thread_is_found_all_the_same():
    (stacks,) = only("faulthandler_timeout.txt")
    assert stacks.threads[0].name == "MainThread"
    assert lines_of(stacks.threads[0]) == MAIN


def test_a_fatal_error_is_stacks_and_the_end_of_the_process():
    stacks, exited = only("faulthandler_fatal.txt")
    assert lines_of(stacks.threads[0])[:2] == ["__init__.py:519 string_at", "segv.py:4 crash"]
    assert isinstance(exited, Exited)
    assert exited.reason == "Fatal Python error: Segmentation fault"


def test_a_stack_that_was_cut_after_100_frames_is_read_so_far():
    one_thread, all_threads = only("faulthandler_deep.txt")
    assert [len(t.frames) for t in (*one_thread.threads, *all_threads.threads)] == [100, 100]
    assert one_thread.threads[0].name == "MainThread"


def test_dumps_that_follow_one_another_are_apart():
    one = sample("faulthandler_timeout.txt").data
    found = events(FaulthandlerText(), Dump(path="a", data=one * 3))[None]
    assert [len(stacks.threads) for stacks in found] == [2, 2, 2]


def test_what_is_no_frame_ends_a_stack_or_is_passed_over():
    dump = text(
        "Fatal Python error: Aborted",
        "Thread 0x01 [python3] (most recent call first):",
        "  <no Python frame>",
        "Current thread 0x02 [python3] (most recent call first):",
        "  Garbage-collecting",
        '  File "train.py", line 7 in step',
        "  File ???, line ??? in ???",
        "  ...",
        "Extension modules: numpy (total: 1)",
        '  File "other.py", line 1 in f',
    )
    stacks, _ = events(FaulthandlerText(), dump)[None]
    assert [lines_of(thread) for thread in stacks.threads] == [["train.py:7 step", "???:0 ???"], []]


def test_ranks_in_one_log_are_apart():
    head, frame = "Current thread 0x01 (most recent call first):", '  File "t.py", line {} in f'
    lines = [f"[default{r}]:{part}" for part in (head, frame) for r in (0, 1)]
    lines = [line.format(index) for index, line in enumerate(lines)]
    found = list(FaulthandlerText().read(text(*lines)))
    assert [(d.rank, d.local_rank, d.events[0].threads[0].frames[0].line) for d in found] == [
        (None, 0, 2),
        (None, 1, 3),
    ]


def test_a_real_crash_is_read(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, os\nfaulthandler.enable()\ndef crash():\n    os.abort()\ncrash()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, timeout=60, check=False)
    stacks, exited = events(FaulthandlerText(), Dump(path="log", data=done.stderr))[None]
    assert isinstance(stacks, Stacks)
    assert [(f.file, f.line, f.function, f.user) for f in stacks.threads[0].frames] == [
        (str(script), 4, "crash", True),
        (str(script), 5, "<module>", True),
    ]
    assert exited.reason == "Fatal Python error: Aborted"
