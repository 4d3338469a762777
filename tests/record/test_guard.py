"""What a part of the tool raises does not reach the program, and somebody is notified."""

from __future__ import annotations

import pytest

from distdiag.record.guard import Guard, WideGuard, guarded


def test_what_a_block_raises_is_reported_and_the_program_goes_on() -> None:
    reported: list[Exception] = []
    guard = Guard(reported.append)
    for text in ("one", "two"):  # one guard serves many blocks
        with guard:
            raise ValueError(text)
    assert [str(error) for error in reported] == ["one", "two"]


def test_a_block_that_raises_nothing_tells_nobody() -> None:
    reported: list[Exception] = []
    with Guard(reported.append):
        pass
    assert reported == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_of_ours_passes_through(kind: type[BaseException]) -> None:
    reported: list[Exception] = []
    with pytest.raises(kind), Guard(reported.append):
        raise kind
    assert reported == []


def test_a_wide_guard_lets_nothing_through() -> None:
    reported: list[BaseException] = []
    with WideGuard(reported.append):
        raise SystemExit(3)
    assert [type(error) for error in reported] == [SystemExit]


def test_who_is_reported_may_raise_what_belongs_to_the_program() -> None:
    def pass_on(error: Exception) -> None:
        raise error

    with pytest.raises(ValueError, match="the program's"), Guard(pass_on):
        raise ValueError("the program's")


def test_a_part_that_fails_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise OSError("no room\nanywhere")

    guarded(fail, "observation")
    assert capsys.readouterr().err == (
        "distdiag: observation failed, the script runs unobserved: OSError: no room anywhere\n"
    )
