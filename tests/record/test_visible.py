"""What strangers wrote is shown, and steers nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdiag.record.visible import json_text, visible, visible_lines


@given(st.text())
def test_every_sign_that_is_left_can_be_seen(text):
    assert visible(text).isprintable()
    assert all(line.isprintable() for line in visible_lines(text).split("\n"))
    assert visible_lines(text).count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}", "café ☃"),
        ("\x1b[2J\x9b31m", "\\x1b[2J\\x9b31m"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("a\tb\r\nc", "a   b\\r\nc"),
        ("\ud800", "\\ud800"),
    ],
)
def test_the_rest_is_spelled_out(text, shown):
    assert visible_lines(text) == shown


@given(st.dictionaries(st.text(), st.lists(st.text())))
def test_json_says_the_same_without_signs_that_steer(value):
    written = json_text(value)
    assert all(line.isprintable() for line in written.split("\n"))
    assert json.loads(written) == value


def test_json_spells_out_bytes_that_are_no_text():
    assert json.loads(json_text({"caf\udce9": ["\ud800"]})) == {"caf\\udce9": ["\\ud800"]}
