"""The JSON of py-spy."""

import pytest

from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.py_spy_json import PySpyJson
from distdiag.events.errors import DamagedFileError
from tests.dumps.reading import lines_of, read, sample, text


def test_a_dump_is_stacks_with_the_main_thread_first():
    (dump,) = read(PySpyJson(), sample("py_spy.json"))
    assert (dump.rank, dump.pid) == (None, 6250)
    main, loader = dump.events[0].threads
    assert (main.name, loader.name) == ("MainThread", "loader")
    assert lines_of(main)[0] == "hang.py:12 train"
    assert [frame.user for frame in loader.frames] == [False, False, True, False, False, False]


def test_processes_stay_apart():
    thread = '{{"pid": {}, "thread_id": 1, "frames": []}}'
    assert [
        dump.pid for dump in read(PySpyJson(), text(f"[{thread.format(7)}, {thread.format(8)}]"))
    ] == [7, 8]


@pytest.mark.parametrize(
    "data",
    [
        sample("py_spy.json").data[:-20],
        b'[{"thread_id": 1, "frames": 3}]',
        b'[{"thread_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]",
        b'[{"thread_id": 1, "frames": [{"name": "\xff\xfe", "filename": "a"}]}]',
    ],
    ids=["cut", "other", "deep", "no text"],
)
def test_damage_is_one_line_with_the_path(data):
    with pytest.raises(DamagedFileError, match=r"^a\.json: not a py-spy dump: [^\n]+$"):
        read(PySpyJson(), Dump(path="a.json", data=data))


def test_other_json_is_not_recognised():
    assert not PySpyJson().recognises(text('[{"name": 1}]'))
    assert not PySpyJson().recognises(text('{"thread_id": 1}'))
