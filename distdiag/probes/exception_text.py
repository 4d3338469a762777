"""What an exception says of itself, as text that can be written down, whatever its class does."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Final

from distdiag.shortened import shortened

_LONGEST_PART: Final = 2_000
"""A frame needs 200 characters or less: what is longer is a message, or a line of data."""


def plain(text: str) -> str:
    """Return a text as a plain str, in which what no file can hold (surrogates) is spelt out."""
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or why it cannot be shown."""
    try:
        return plain(str(error))
    except BaseException as problem:  # noqa: BLE001 (its own code: it may raise what it likes)
        return f"(its message cannot be shown: __str__ raised {type(problem).__name__})"


def traceback_of(error: BaseException, trace: TracebackType | None, length: int) -> str:
    """Return the traceback as Python prints it, with huge messages and the middle left out."""
    try:
        parts = traceback.format_exception(type(error), error, trace)
    except Exception as problem:  # noqa: BLE001 (causes, notes and names may be of any kind)
        place = "".join(traceback.format_tb(trace))
        return shortened(plain(f"{place}(no more can be shown: {type(problem).__name__})"), length)
    # A message is one part, and a frame with its source another: no message pushes frames out.
    return shortened("".join(shortened(plain(part), _LONGEST_PART) for part in parts), length)
