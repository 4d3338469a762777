"""How a test that failed on some of its ranks is shown."""

from __future__ import annotations

from io import StringIO
from typing import Any, NamedTuple

from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter


class Part(NamedTuple):
    """One piece of a failure under its title; `body` is text or what pytest can draw."""

    title: str
    body: Any


class RankFailures(TerminalRepr):
    """What pytest keeps as the `longrepr` of a failed test: one part below the other."""

    def __init__(self, summary: str, parts: tuple[Part, ...], *, path: str, line: int) -> None:
        """Keep the parts; `summary` is the one line for pytest's short summary and for JUnit."""
        self.parts = parts
        self.reprcrash = ReprFileLocation(path, line, summary)

    def toterminal(self, writer: TerminalWriter) -> None:
        """Draw all parts."""
        for part in self.parts:
            if part.title:
                writer.sep("_", part.title)
            if hasattr(part.body, "toterminal"):
                part.body.toterminal(writer)
            else:
                writer.line(str(part.body).rstrip("\n"))

    def __str__(self) -> str:
        """Return the same as text, for reports in files and for other processes."""
        text = StringIO()
        writer = TerminalWriter(text)
        writer.hasmarkup = False
        self.toterminal(writer)
        return text.getvalue().strip()
