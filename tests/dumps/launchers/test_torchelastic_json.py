"""The error file of one rank."""

import pytest

from distdiag.dumps.launchers.torchelastic_json import TorchelasticJson
from distdiag.dumps.reading import Dump
from distdiag.events.errors import DamagedFileError
from tests.dumps.reading import events, read, sample, text


def test_the_exception_and_its_time_are_read():
    (raised,) = events(TorchelasticJson(), sample("error.json"))[None]
    assert (raised.type, raised.message) == ("RuntimeError", "recorded")
    assert raised.time_ns == 1795847462 * 10**9
    assert [(f.function, f.line, f.user) for f in raised.frames] == [
        ("main", 5, True),
        ("wrapper", 367, False),
    ]


def test_without_a_stack_the_message_is_what_there_is():
    (raised,) = events(
        TorchelasticJson(), text('{"message": {"message": "ValueError: x", "extraInfo": {}}}')
    )[None]
    assert (raised.type, raised.message, raised.frames, raised.time_ns) == (
        "ValueError",
        "x",
        (),
        0,
    )


@pytest.mark.parametrize(
    "data", [b'{"message": 3, "extraInfo": 1}', sample("error.json").data[:-5]]
)
def test_damage_is_one_line_with_the_path(data):
    with pytest.raises(DamagedFileError, match=r"^e\.json: not a torchelastic error file: [^\n]+$"):
        read(TorchelasticJson(), Dump(path="e.json", data=data))


def test_other_json_is_not_recognised():
    assert not TorchelasticJson().recognises(text('{"message": "hello"}'))
