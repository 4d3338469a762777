"""How wide a report is at a terminal, and whether it has colours."""

import io
import os
import pty

import pytest

from distdiag.reports.surface import surface_of


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def terminal():
    """A real terminal of 132 columns."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 132, 0, 0))
    with os.fdopen(follower, "w") as stream:
        yield stream
    os.close(leader)


def test_what_is_no_terminal_has_a_hundred_columns_and_no_colours(tmp_path):
    assert surface_of(io.StringIO()) == (100, False)
    with (tmp_path / "log").open("w") as file:
        assert surface_of(file) == (100, False)
    assert surface_of(file) == (100, False)  # even when it is closed


def test_a_terminal_says_how_wide_it_is_and_has_colours(terminal):
    assert surface_of(terminal) == (132, True)


@pytest.mark.parametrize(
    ("columns", "width"), [("90", 90), ("3", 40), ("100000", 400), ("many", 132), ("0", 132)]
)
def test_columns_go_before_the_terminal(terminal, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert surface_of(terminal).width == width


def test_a_dumb_terminal_has_no_colours(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not surface_of(terminal).color


def test_colours_are_forced_and_taken_away(terminal, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert surface_of(io.StringIO()).color
    monkeypatch.setenv("FORCE_COLOR", "0")
    assert not surface_of(io.StringIO()).color
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not surface_of(terminal).color
