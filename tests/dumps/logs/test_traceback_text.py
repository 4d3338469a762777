"""Exceptions in logs: who raised what, and what was caught."""

from distdiag.dumps.logs.traceback_text import SURVIVED_AFTER, TracebackText
from distdiag.dumps.reading import Dump
from tests.dumps.reading import events, read, sample, text

HEAD = "Traceback (most recent call last):"


def traceback(error, line=7, function="step"):
    return [HEAD, f'  File "/home/me/train.py", line {line}, in {function}', "    work()", error]


def raised(dump):
    return {
        rank: [(e.type, e.message, e.frames[0].line) for e in found]
        for rank, found in events(TracebackText(), dump).items()
    }


def test_each_rank_of_a_real_log_has_its_own_exception():
    found = events(TracebackText(), sample("torchrun_raised.log"))
    (one,), (zero,) = found.pop(1), found.pop(0)
    assert found == {}  # the launcher's own traceback is nobody's
    assert (one.type, one.message) == ("ValueError", "bad batch\nsecond line: of message")
    assert [(f.function, f.line, f.user) for f in one.frames] == [
        ("step", 11, True),
        ("main", 19, True),
        ("<module>", 20, True),
    ]
    assert zero.type == "RuntimeError"
    assert "Connection closed by peer" in zero.message
    assert [(f.function, f.user) for f in zero.frames][:3] == [
        ("all_reduce", False),
        ("wrapper", False),
        ("step", True),
    ]
    assert one.thread == zero.thread == "MainThread"


def test_the_text_holds_the_exceptions_that_led_to_the_last_one():
    (one,) = events(TracebackText(), sample("torchrun_raised.log"))[1]
    assert one.traceback.startswith(HEAD)
    assert "KeyError: 'batch'\nThe above exception was the direct cause" in one.traceback
    assert one.traceback.endswith("ValueError: bad batch\nsecond line: of message")


def test_prefixes_of_torchrun_change_nothing():
    plain, tee = (sample(f"torchrun_{name}.log") for name in ("raised", "tee"))
    assert raised(tee)[1] == raised(plain)[1]
    assert {d.rank: d.local_rank for d in read(TracebackText(), tee)} == {0: 0, 1: 1}


def test_where_only_the_local_rank_is_known_it_is_reported():
    found = read(TracebackText(), sample("torchrun_recorded.log"))
    # The summary repeats the traceback among the fields of the rank.
    assert [(dump.rank, dump.local_rank) for dump in found] == [(None, 1), (1, 1)]
    assert {dump.events[0].message for dump in found} == {"recorded"}


def test_lines_of_ranks_may_be_mixed():
    mixed = [
        line
        for pair in zip(traceback("ValueError: a"), traceback("KeyError: 'b'", 8), strict=True)
        for line in (f"[rank0]: {pair[0]}", f"[rank1]: {pair[1]}")
    ]
    assert raised(text(*mixed)) == {0: [("ValueError", "a", 7)], 1: [("KeyError", "'b'", 8)]}


def test_of_one_process_the_last_exception_is_the_one_that_nobody_caught():
    log = text("INFO step 1", *traceback("OSError: retry"), "step 2", *traceback("ValueError: x"))
    assert raised(log) == {None: [("ValueError", "x", 7)]}


def test_a_process_that_goes_on_has_survived_its_exception():
    after = [f"step {n}" for n in range(SURVIVED_AFTER)]
    assert raised(text(*traceback("OSError: retry"), *after)) == {}
    # Where a launcher saw a failure, other ranks may have written what follows.
    failed = [*traceback("OSError: gone"), *after, "srun: error: node1: task 1: Exited"]
    assert raised(text(*failed)) == {None: [("OSError", "gone", 7)]}


def test_an_exception_that_ended_a_thread_is_that_threads():
    log = text("Exception in thread Thread-3 (work):", *traceback("ValueError: x"), "step 2")
    (found,) = events(TracebackText(), log)[None]
    assert (found.thread, found.type) == ("Thread-3 (work)".partition(" ")[0], "ValueError")


def test_what_python_ignored_is_not_raised():
    log = text("Exception ignored in: <function f at 0x7f>", *traceback("ValueError: x"))
    assert raised(log) == {}


def test_the_exception_of_a_data_loaders_worker_is_a_part_of_the_message():
    log = text(
        *traceback("ValueError: Caught ValueError in DataLoader worker process 0."),
        "Original Traceback (most recent call last):",
        '  File "/home/me/data.py", line 3, in __getitem__',
        "ValueError: empty sample",
    )
    ((kind, message, line),) = raised(log)[None]
    assert (kind, line) == ("ValueError", 7)
    assert message.endswith("worker process 0. (ValueError: empty sample)")


def test_a_process_of_spawn_is_named_by_its_parent():
    log = text(
        *traceback("torch.multiprocessing.spawn.ProcessRaisedException: "),
        "",
        "-- Process 2 terminated with the following error:",
        *traceback("ValueError: x"),
    )
    (dump,) = read(TracebackText(), log)
    assert (dump.rank, dump.local_rank, dump.events[0].type) == (None, 2, "ValueError")


def test_a_traceback_without_its_end_is_left_out():
    assert raised(text(*traceback("ValueError: x")[:-1])) == {}
    assert raised(text(*traceback("=====")[:-1], "=====")) == {}
    # Without prefixes two processes that write at once cannot be told apart.
    assert raised(text(HEAD, HEAD, *traceback("ValueError: x")[1:])) == {
        None: [("ValueError", "x", 7)]
    }


def test_groups_of_exceptions_and_syntax_errors_are_read():
    group = text(
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/home/me/train.py", line 7, in step',
        "  |     work()",
        "  | ExceptionGroup: two (2 sub-exceptions)",
    )
    assert raised(group) == {None: [("ExceptionGroup", "two (2 sub-exceptions)", 7)]}
    syntax = text(
        *traceback("")[:-1],
        '  File "/home/me/b.py", line 1',
        "    a b",
        "      ^",
        "SyntaxError: invalid",
    )
    assert raised(syntax) == {None: [("SyntaxError", "invalid", 7)]}


def test_a_recursion_keeps_the_innermost_frames():
    frames = [line for n in range(2000) for line in (f'  File "a.py", line {n}, in f', "    f()")]
    (found,) = events(TracebackText(), text(HEAD, *frames, "RecursionError: too deep"))[None]
    assert [found.frames[0].line, found.frames[-1].line] == [1999, 1700]
    assert len(found.traceback) <= 20_000


def test_a_log_that_was_cut_and_holds_noise_is_read():
    noise = b"\x00\xff\x1b[31m" + b"x" * 100_000 + b"\r\n"
    data = noise + "\r\n".join(traceback("ValueError: x")).encode() + b"\r\n" + noise
    assert raised(Dump(path="log", data=data)) == {None: [("ValueError", "x", 7)]}


def test_a_box_of_rich_without_its_top_is_read():
    box = [
        "│ ❱ 988 │   return self._apply(convert)          │",
        "│ /data/train.py:7 in main                      │",
        "╰───────────────────────────────────────────────╯",
    ]
    assert raised(text(*box, "ValueError: x")) == {None: [("ValueError", "x", 7)]}
    assert not raised(text(*box, "step 3 loss 2.1"))
    assert raised(text(*box, "step 3", *traceback("KeyError: y"))) == {None: [("KeyError", "y", 7)]}
