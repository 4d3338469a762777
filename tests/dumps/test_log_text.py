"""Text that is wrapped in something: two bytes a character, JSON, lines broken at a width."""

import json

import pytest

from distdiag.dumps.log_text import joined, plain
from distdiag.dumps.reading import Dump

TEXT = 'one █ é\n  File "train.py", line 9, in <module>\n' * 4


def read(data):
    return plain(Dump(path="log", data=data)).data.decode()


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_encodings_with_and_without_a_mark(encoding):
    assert read(TEXT.encode(encoding)) == TEXT


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x02}q\x00.", bytes(range(256)) * 8, b"\0" * 100, b"x\0y" * 30, b"plain"]
)
def test_what_is_no_such_text_stays_as_it_is(data):
    dump = Dump(path="log", data=data)
    assert plain(dump) is dump


def of_json(*records):
    return read("".join(json.dumps(record) + "\n" for record in records).encode())


def test_a_container_s_lines_have_their_time_before_them():
    time = "2025-01-01T10:00:00.000Z"
    assert of_json({"log": "one\n", "stream": "stderr", "time": time}) == f"({time}) one\n"


def test_a_line_that_docker_cut_is_one_line_again():
    long = "x" * (1 << 14)
    assert of_json({"log": long, "stream": "a"}, {"log": "y\n", "stream": "a"}) == f"{long}y\n"


def test_who_wrote_a_record_stands_before_its_text():
    assert of_json({"msg": "one\ntwo", "rank": 3, "pid": 7}) == (
        "(rank=3 pid=7) one\n(rank=3 pid=7) two\n"
    )
    assert of_json({"message": "x", "kubernetes": {"pod_name": "llm-2"}}) == "(pod=llm-2) x\n"


def test_a_traceback_that_a_logger_keeps_apart_follows_its_message():
    raised = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x'
    assert of_json({"message": "failed", "exc_info": raised}) == f"failed\n{raised}\n"


def test_loguru_s_records_name_process_and_extra_fields():
    record = {"process": {"id": 31, "name": "MainProcess"}, "extra": {"rank": 2}}
    record["time"] = {"repr": "2025-01-01 10:00:00.000+00:00", "timestamp": 1.0}
    assert of_json({"text": "one\n", "record": record}) == (
        "(2025-01-01T10:00:00.000+00:00 rank=2 pid=31) one\n"
    )


def test_lines_that_are_no_json_stay_among_those_that_are():
    data = b'{"log": "one\\n"}\n[rank1]: two\n{"log": "three\\n"}\n'
    assert read(data) == "one\n[rank1]: two\nthree\n"


def test_other_json_stays_as_it_is():
    for data in (b'{"pg_config": {}, "entries": []}\n', b'[{"pid": 1}]', b'{"message": {"a": 1}}'):
        assert read(data) == data.decode()


@pytest.mark.parametrize(
    "broken",
    [
        '  File "/a/b/tr\nain.py", line 9, in f\n',
        '  File "/a/b/train.py"\n, line 9, in f\n',
        '  File "/a/b/train.py", li\nne 9, in f\n',
        '  File "/a/b/train.py", line\n 9, in f\n',
    ],
)
def test_a_frame_that_was_broken_is_one_line_again(broken):
    assert joined(broken.encode()) == b'  File "/a/b/train.py", line 9, in f\n'


def test_frames_that_are_whole_are_left_alone():
    whole = (
        b'  File "a.py", line 9, in f\n    x = "b.py", line 3\n  File "<string>", line 1\n    a b\n'
    )
    assert joined(whole) == whole
