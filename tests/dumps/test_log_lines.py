"""Lines of logs of several ranks, whatever their encoding."""

import pytest

from distdiag.dumps.log_lines import LONGEST_LINE, Speaker, open_log, streams
from distdiag.dumps.reading import Dump
from tests.dumps.reading import text


def spoken(data):
    anything = [bytes([byte]) for byte in range(256) if byte not in b"\r\n"]
    dump = Dump(path="log", data=data)
    found = [(*line.speaker[:2], line.text) for line in open_log(dump).lines_with(anything)]
    apart = [(*speaker[:2], line) for speaker, lines in streams(dump) for line in lines()]
    assert sorted(map(str, apart)) == sorted(map(str, found))
    return found


@pytest.mark.parametrize(
    ("line", "rank", "local_rank", "rest"),
    [
        ("plain", None, None, "plain"),
        ("[rank3]: Traceback", 3, None, "Traceback"),
        ('[rank3]:   File "a"', 3, None, '  File "a"'),
        ("[rank11]:[E1128 06:24:44.9 P.cpp:616] x", 11, None, "[E1128 06:24:44.9 P.cpp:616] x"),
        ("[default3]:Traceback", None, 3, "Traceback"),
        ("[default3]:[rank11]: Traceback", 11, 3, "Traceback"),
        ("[1,5]<stderr>:Traceback", 5, None, "Traceback"),
        ("[5]<stderr>:Traceback", 5, None, "Traceback"),
        ("[1,mpirank:5,algo-2]<stderr>:Traceback", 5, None, "Traceback"),
        ("18:11:06.680 [rank4]:[E205 x", 4, None, "[E205 x"),
        ("worker-1: [rank9]: x", 9, None, "x"),
        ("\x1b[31m[default0]:red\x1b[0m", None, 0, "red"),
        ("3: not all lines are labelled", None, None, "3: not all lines are labelled"),
        ("x" * 200 + "[rank1]: x", None, None, "x" * 200 + "[rank1]: x"),
    ],
)
def test_who_wrote_a_line(line, rank, local_rank, rest):
    assert spoken(line.encode()) == [(rank, local_rank, rest)]


def test_labels_of_srun_count_where_nearly_all_lines_have_them():
    log = b" 0: [rank8]: a\n 1: b\n10: c\n 1:\n"
    assert spoken(log) == [(8, None, "a"), (1, None, "b"), (10, None, "c"), (1, None, "")]


@pytest.mark.parametrize(
    "data",
    [
        "one\r\ntwo é\r\n".encode(),
        "one\n\n\ntwo é".encode(),
        "\x1b[1;31mone\x1b[0m\x00\ntwo\x07 é".encode(),
        "one\rtwo é\r".encode(),
        "one\ntwo é".encode("utf-16"),
        "\x1b]8;;http://x\x1b\\one\x1b]8;;\x07\ntwo é".encode(),
    ],
)
def test_endings_colours_and_encodings_do_not_matter(data):
    assert [line for *_, line in spoken(data)] == ["one", "two é"]


def test_broken_encodings_are_read_with_gaps():
    assert spoken(b"caf\xe9 \xff\xfe\n") == [(None, None, "caf\ufffd \ufffd\ufffd")]


def test_of_an_endless_line_the_beginning_is_read():
    log = Dump(path="log", data=b"x" * (8 << 20) + b"y\nend")
    (stream,) = streams(log)
    assert [len(line) for line in stream.lines()] == [LONGEST_LINE, 3]
    assert [len(line.text) for line in open_log(log).lines_with([b"y", b"end"])] == [
        LONGEST_LINE,
        3,
    ]


def test_streams_hold_the_lines_of_one_speaker_each():
    log = text("[rank0]: a", "x", "[rank1]: b", "[rank0]: c", "x2")
    found = {stream.speaker: list(stream.lines()) for stream in streams(log)}
    assert found == {
        Speaker(0): ["a", "c"],
        Speaker(): ["x", "x2"],
        Speaker(1): ["b"],
    }


def test_a_local_rank_that_is_one_rank_only_is_that_rank_everywhere_in_the_file():
    log = text(
        "[default1]:a",
        "[default1]:[rank9]: b",
        "[default0]:[rank0]: c",
        "[default0]:[rank8]: d",
        "[default0]:e",
    )
    assert [stream.speaker for stream in streams(log)] == [
        Speaker(9, 1),
        Speaker(9, 1),
        Speaker(0, 0),
        Speaker(8, 0),
        Speaker(None, 0),
    ]


def test_only_lines_that_hold_a_word_are_looked_at():
    log = b"a\nbad 1 worse\r\nc bad\rd\n#2\n 3#\n[rank2]: bad"
    found = open_log(Dump(path="log", data=log)).lines_with([b"bad", b"worse", b"\n#"])
    assert [(line.speaker.rank, line.text) for line in found] == [
        (None, "bad 1 worse"),
        (None, "c bad"),
        (None, "#2"),
        (2, "bad"),
    ]


def test_lines_of_a_process_are_of_the_rank_that_others_of_it_name():
    worker = "(Worker pid=933, ip=10.0.0.4) "
    lines = [
        f"{worker}[rank1]:[E528 08:52:46.164295950 ProcessGroupGloo.cpp:145] failed",
        f"{worker}Traceback (most recent call last):",
        f'{worker}  File "/data/train.py", line 3, in main',
        f"{worker}RuntimeError: no",
    ]
    assert {stream.speaker.rank for stream in streams(text(*lines))} == {1}
    other = [line.replace("pid=933", "pid=934") for line in lines]
    ranks = {stream.speaker.rank for stream in streams(text(*lines, *other))}
    assert ranks == {1, None}  # two processes that are rank 1 are of two jobs


@pytest.mark.parametrize(
    ("head", "rank", "local_rank"),
    [
        ("==> logs/rank_3.log <==", 3, None),
        ("----------Begin global rank 3 STDERR----------", 3, None),
        ("==> /tmp/x/attempt_0/3/stderr.log <==", None, 3),
        ("==> run7/local_rank_3.out <==", None, 3),
        ("==> run7/dp_rank_3.out <==", None, None),
        ("==> logs/train.log <==", None, None),
        ("a ==> rank3 <== b", None, None),
    ],
)
def test_a_heading_names_the_rank_of_the_lines_below_it(head, rank, local_rank):
    lines = ["step 1", head, "Traceback (most recent call last):", "", "[rank5]: ValueError: no"]
    log = open_log(text(*lines, "----------End global rank 3 STDERR----------", "step 2"))
    found = {line.text: line.speaker[:2] for line in log.lines_with([b"e"])}
    assert found["step 1"] == (None, None)
    assert found["Traceback (most recent call last):"] == (rank, local_rank)
    assert found["ValueError: no"] == (5, None)
    assert found["step 2"] == (None, None)
