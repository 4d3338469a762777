"""Prefixes that are learned from a log, and whom they name."""

import pytest

from distdiag.dumps.log_lines import Speaker, open_log, streams
from distdiag.dumps.log_prefixes import ranks_of_labels, speaker_in, time_in
from tests.analysis.failed_logs import BAR, FAULT
from tests.dumps.reading import text


def spoken(*lines):
    return {speaker: list(read()) for speaker, read in streams(text(*lines))}


@pytest.mark.parametrize(
    ("prefix", "speaker"),
    [
        ("[Rank 2] ", Speaker(2)),
        ("rank2| ", Speaker(2)),
        ("<GLOBAL_RANK: 2> ", Speaker(2)),
        ("[2]: ", Speaker(2)),
        ("2: ", Speaker(2)),
        ("[prterun-node0-77@1,2]<stderr>: ", Speaker(2)),
        ("[2]<stderr>:", Speaker(2)),
        ("[1,mpirank:2,algo-1]<stdout>:", Speaker(2)),
        ("[local_rank 1] ", Speaker(None, 1)),
        ("(Trainer pid=12, ip=10.0.0.4, rank=2) ", Speaker(2, None, "Trainer pid=12, ip=10.0.0.4")),
        ("(TrainWorker pid=31, ip=10.0.0.1) ", Speaker(label="TrainWorker pid=31, ip=10.0.0.1")),
        ("node3: ", Speaker(label="node3")),
        ("[2025-07-23 19:34:51 TP3] ", Speaker(label="TP3")),
        ("[2025-07-23 19:34:51 DP1 TP0] ", Speaker(label="DP1 TP0")),
        ("[pod/llm-7f9c-2/main] ", Speaker(label="pod/llm-7f9c-2/main")),
        ("2025-01-01 10:00:00,000 - ERROR - __main__ - ", Speaker()),
        ("2025-01-01T10:00:00.000Z stderr F ", Speaker()),
        ("Jan  1 10:00:00 ", Speaker()),
        ("ERROR 07-23 19:34:51 [multiproc_executor.py:487] ", Speaker()),
    ],
)
def test_what_a_prefix_names(prefix, speaker):
    assert spoken(*(prefix + line for line in FAULT)) == {speaker: list(FAULT)}


def test_other_levels_numbers_and_speakers_share_a_template():
    other = "(Worker pid=7) INFO 07-23 19:34:50 [gpu.py:12] "
    found = spoken(
        *(f"(Worker pid=31) ERROR 07-23 19:34:51 [multi.py:487] {line}" for line in FAULT),
        f"{other}ready",
        "(Worker pid=7) of another form",
    )
    assert found == {
        Speaker(label="Worker pid=31"): list(FAULT),
        Speaker(label="Worker pid=7"): ["ready"],
        Speaker(): ["(Worker pid=7) of another form"],
    }


def test_numbers_that_grow_with_each_line_name_nobody():
    found = spoken(*(f"{n:5}| {line}" for n, line in enumerate(["a", *FAULT, "b"], 8)))
    assert found == {Speaker(): ["a", *FAULT, "b"]}


def test_a_head_behind_a_bar_is_a_line_of_its_own():
    bar = BAR.replace("█", "█" * 20)
    found = spoken(f"{bar}[Rank 2] {FAULT[0]}", *(f"[Rank 2] {line}" for line in FAULT[1:]))
    assert found == {Speaker(): [bar], Speaker(2): list(FAULT)}


def test_text_with_a_frame_in_it_is_no_prefix():
    lines = ['see  File "a.py", line 1, in f', "see you", *FAULT]
    assert spoken(*lines) == {Speaker(): lines}


@pytest.mark.parametrize(
    ("labels", "ranks"),
    [
        (["worker-0", "worker-1", "worker-2"], {"worker-0": 0, "worker-1": 1, "worker-2": 2}),
        (["TP0", "TP1"], {"TP0": 0, "TP1": 1}),
        (["worker-1", "worker-2"], {}),  # from 1: nothing says that rank 0 is no other
        (["worker-0", "worker-2"], {}),
        (["master-0", "worker-0", "worker-1"], {}),
        (["node0", "node1"], {}),  # each may have several ranks
        (["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"], {}),
        (["W pid=30, ip=10.0.0.0", "W pid=31, ip=10.0.0.1"], {}),
        (["worker-0"], {}),
    ],
)
def test_labels_are_ranks_only_where_nothing_else_can_be_meant(labels, ranks):
    assert ranks_of_labels(Speaker(label=label) for label in labels) == ranks


def test_labels_beside_ranks_are_names():
    assert ranks_of_labels([Speaker(label="w-0"), Speaker(label="w-1"), Speaker(3)]) == {}


@pytest.mark.parametrize(
    ("stamp", "second"),
    [
        (b"2025-01-01T10:00:00Z x", 1735725600),
        (b"[2025-01-01 10:00:00,500] x", 1735725600.5),
        (b"2025-01-01T12:00:00.5+02:00 x", 1735725600.5),
        (b"2025/01/01 10:00:00 x", 1735725600),
        (b"2025-13-01T10:00:00Z", 0),
        (b"10:00:00 x", 0),
    ],
)
def test_times(stamp, second):
    assert time_in(stamp) == int(second * 1e9)


def test_the_time_of_a_line_is_that_before_its_text():
    log = open_log(text("x", "2025-01-01T10:00:00Z a 2026-01-01T10:00:00Z", "b"))
    (line,) = log.lines_with([b" a "])
    assert log.time_ns(line.place + 1) == 0
    assert log.time_ns(line.place + 22) == 1735725600 * 10**9


def test_words_that_hold_rank_are_no_ranks():
    assert speaker_in("crank 3") == Speaker(label="crank 3")
    assert speaker_in("tp_rank 3") == Speaker()
