"""Repeats in sequences."""

import pytest

from distdiag.replay.source import Repeat, repeats


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ("", []),
        ("abc", [Repeat(("a", "b", "c"), 1)]),
        ("aaab", [Repeat(("a",), 3), Repeat(("b",), 1)]),
        ("xabababy", [Repeat(("x",), 1), Repeat(("a", "b"), 3), Repeat(("y",), 1)]),
    ],
)
def test_repeats_are_found(sequence, expected):
    assert repeats(sequence) == expected


def test_joined_they_are_the_sequence():
    sequence = "abcabcabxxxxyabab" * 3
    assert "".join("".join(r.block) * r.times for r in repeats(sequence)) == sequence
