"""Say on stderr how far a long analysis is, and what it could not use."""

from __future__ import annotations

import sys
import time
from typing import Final, Self

from distdiag.reporter import say

TERMINAL_S: Final = 0.1
LINES_S: Final = 10.0
"""Without a terminal there is a line this often, in seconds."""


class Progress:
    """One line that counts the files on a terminal; a line now and then elsewhere."""

    def __init__(self) -> None:
        """Look where stderr goes; nothing is written yet."""
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = time.monotonic()
        self._width = 0

    def show(self, num_files: int) -> None:
        """Say how many files have been read, if it was not said a moment ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (TERMINAL_S if self._is_terminal else LINES_S):
            return
        self._shown_s = now_s
        text = f"distdiag: {num_files} files read"
        if self._is_terminal:
            self._width = len(text)
            say(f"\r{text}")
        else:
            say(f"{text}\n")

    def complain(self, problem: str) -> None:
        """Say in one line what cannot be used."""
        self._clear()
        say(f"distdiag: {problem}\n")

    def _clear(self) -> None:
        if self._width:
            say(f"\r{' ' * self._width}\r")
            self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
