"""Progress is a line that counts on a terminal, and rare lines elsewhere."""

import io
import sys

from distdiag.analysis import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, clock, numbers):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    times = iter(clock)
    with Progress() as progress:
        for number in numbers:
            progress.show(number)
        progress.complain("a: is damaged")
    return stream.getvalue()


def test_a_terminal_shows_one_line_that_is_taken_away(monkeypatch):
    text = shown(monkeypatch, Terminal(), [0, 0.01, 0.2, 0.4], [1, 2, 3])
    assert text.startswith("\rdistdiag: 2 files read\rdistdiag: 3 files read\r")
    assert text.endswith("\rdistdiag: a: is damaged\n")


def test_elsewhere_there_is_a_line_now_and_then(monkeypatch):
    text = shown(monkeypatch, io.StringIO(), [0, 1, 11, 12], [1, 2, 3])
    assert text == "distdiag: 2 files read\ndistdiag: a: is damaged\n"
