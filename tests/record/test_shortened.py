"""Texts that are cut in their middle."""

import pytest

from distdiag.record.exception_text import shortened


def test_a_text_that_fits_is_left_alone():
    assert shortened("a\nb", 3) == "a\nb"


@pytest.mark.parametrize("length", [120, 500, 2_000])
def test_beginning_and_end_stay_and_no_line_is_torn(length):
    text = "\n".join(f"line {number}" for number in range(1_000))
    kept = shortened(text, length)
    assert len(kept) <= length
    first, gap, last = kept.partition("\n[... ")
    assert text.startswith(first + "\n")
    assert text.endswith("\n" + last.partition("...]\n")[2])
    assert len(last) > len(first)
    assert gap


def test_one_long_line_keeps_both_its_ends():
    kept = shortened("a" * 500 + "z" * 500, 200)
    assert kept.startswith("aaa") and kept.endswith("zzz")
    assert "left out" in kept
    assert len(kept) <= 200
