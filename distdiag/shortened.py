"""Texts that are cut in their middle: an exception is told at the end of its traceback."""

from __future__ import annotations

from typing import Final

LONGEST_TRACEBACK: Final = 6_000
"""In a finding; the record has ten times this, but a report is read by people."""
_OF_THE_END: Final = 3 / 4
"""So much of what is kept is the end: the last frames and the line of the exception."""


def shortened(text: str, length: int) -> str:
    """Return the text, or its beginning and its end where it is longer than `length`.

    It is cut between lines where they are short enough.
    """
    if len(text) <= length:
        return text
    gap = f"\n[... {len(text) - length} of {len(text)} characters are left out ...]\n"
    room = max(0, length - len(gap))
    num_last = int(room * _OF_THE_END)
    first, last = text[: room - num_last], text[len(text) - num_last :]
    # Half a line tells nothing, unless it is most of what there is.
    if "\n" in first[len(first) // 2 :]:
        first = first[: first.rindex("\n")]
    if "\n" in last[: len(last) // 2]:
        last = last[last.index("\n") + 1 :]
    return f"{first}{gap}{last}"
