"""Texts that are cut in their middle."""

import re
from pathlib import Path

import pytest

from distdiag.record.exception_text import first_of_chain, shortened, traceback_of


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


def failing(depth):
    if depth:
        failing(depth - 1)
    error = ValueError("bad batch")
    for number in range(6):
        error.add_note(f"note {number} " + "x" * 1_500)
    raise error


def in_a_group():
    try:
        failing(2)
    except ValueError as error:
        raise ExceptionGroup("some failed", [error]) from None


@pytest.mark.parametrize("length", [3_000, 6_000])
def test_notes_never_push_out_the_last_frame(length):
    with pytest.raises(ValueError, match="bad batch") as caught:
        failing(90)
    text = traceback_of(caught.value, caught.value.__traceback__, length)
    assert len(text) <= length
    *_, frame = re.findall(r'File ".*", line \d+, in (\w+)\n    (.*)', text)
    assert frame == ("failing", "raise error")
    assert text.index("note 5") > text.index("raise error")


def test_the_last_frame_of_a_group_of_exceptions_stays():
    with pytest.raises(ExceptionGroup) as caught:
        in_a_group()
    text = traceback_of(caught.value, caught.value.__traceback__, 4_000)
    assert len(text) <= 4_000
    assert "raise error" in text


def test_a_text_whose_frames_are_at_its_beginning_keeps_them_once():
    frame = '  File "train.py", line 3, in main\n    step()'
    text = f"{frame}\n" + "y" * 5_000
    assert shortened(text, 1_000).count("train.py") == 1


def test_ten_megabytes_of_frames_are_shortened_quickly():
    text = '  File "a.py", line 1, in f\n    f()\n' * 250_000
    assert len(shortened(text, 6_000)) <= 6_000


def test_the_first_of_a_chain_of_exceptions_is_found():
    def chain():
        try:
            try:
                Path("/nowhere/x").read_text()
            except OSError:
                raise KeyError("batch")  # noqa: B904
        except KeyError as error:
            raise ValueError("bad\nshape: 3") from error

    try:
        chain()
    except ValueError as error:
        text = traceback_of(error, error.__traceback__, 10_000)
    first = "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'"
    assert first_of_chain(text) == first
    assert first_of_chain("\n".join(f"  | {line}" for line in text.splitlines())) == first
    assert not first_of_chain(text.rpartition("direct cause")[2])
    assert not first_of_chain("")
