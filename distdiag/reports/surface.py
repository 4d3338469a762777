"""How wide a report may be at a terminal, and whether it may be in colour."""

import os
from typing import Final, NamedTuple, TextIO

WIDTH: Final = 100
"""Where nobody says how wide it is, in columns: a log, a file, a pipe."""
NARROWEST: Final = 40
WIDEST: Final = 400


class Surface(NamedTuple):
    """What text is written on."""

    width: int
    color: bool


def surface_of(stream: TextIO) -> Surface:
    """Look at a stream and at the environment.

    The width is `COLUMNS`, else that of the terminal, else `WIDTH`. There are colours on a terminal
    unless it is a dumb one; `FORCE_COLOR` gives them everywhere, and `NO_COLOR` takes them away.
    """
    return Surface(_width(stream), _has_colours(stream))


def _width(stream: TextIO) -> int:
    text = os.environ.get("COLUMNS", "")
    columns = int(text) if text.isdecimal() else 0
    if not columns:
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
    return min(WIDEST, max(NARROWEST, columns)) if columns else WIDTH


def _has_colours(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") != "0":
        return True
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # somebody has closed it
        return False
