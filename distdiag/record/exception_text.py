"""What an exception says of itself, as text that can be written down, whatever its class does."""

import re
import traceback
from collections import deque
from types import TracebackType
from typing import Final

from distdiag.record.guard import Guard, WideGuard

# Texts that are cut in their middle: an exception stands at the end of its traceback.

LONGEST_TRACEBACK: Final = 6_000
"""In a finding; the record has ten times this, but a report is read by people."""
_OF_THE_END: Final = 3 / 4
"""So much of what is kept is the end: the last frames and the line of the exception."""


def shortened(text: str, length: int) -> str:
    """Return the text, or its beginning and its end where it is longer than `length`.

    It is cut between lines where they are short enough. The last frame of a traceback stays,
    however much its message, notes and groups of exceptions say after it.
    """
    if len(text) <= length:
        return text
    gap = f"\n[... {len(text) - length} of {len(text)} characters are left out ...]\n"
    room = max(0, length - len(gap))
    num_last = int(room * _OF_THE_END)
    num_first = room - num_last
    frame = _last_frame(text, len(text) - num_last)
    if len(frame) + len(_GAP) > num_last // 2 or frame in text[:num_first]:
        frame = ""
    if frame:
        num_last -= len(frame) + len(_GAP)
    first, last = text[:num_first], text[len(text) - num_last :]
    # Half a line tells nothing, unless it is most of what there is.
    if "\n" in first[len(first) // 2 :]:
        first = first[: first.rindex("\n")]
    if "\n" in last[: len(last) // 2]:
        last = last[last.index("\n") + 1 :]
    if frame:
        last = f"{frame}{_GAP}{last}"
    return f"{first}{gap}{last}"


_GAP: Final = "\n[...]\n"
_FRAME: Final = re.compile(r'^[ |+>-]*File "[^\n]{0,1000}(?:\n[ |]{4}[^\n]{0,400}){0,2}', re.M)
"""The line of a frame, its source, and the marks below that."""


def _last_frame(text: str, before: int) -> str:
    """Return the last frame in a text if it begins before a place, else nothing."""
    frames = deque(_FRAME.finditer(text), maxlen=1)
    return frames[0].group() if frames and frames[0].start() < before else ""


_CONNECTOR: Final = re.compile(
    r"^[ |]{0,40}(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)",
    re.M,
)
_FRAME_LINE: Final = re.compile(r'^[ |]{0,40}File "[^\n]{0,1000}$', re.M)
_EXCEPTION_LINE: Final = re.compile(
    r"^[ |]{0,40}?((?:[^\W\d]\w{0,200}\.){0,20}[A-Z]\w{1,200}(?::.{0,400})?)$", re.M
)


def first_of_chain(text: str) -> str:
    """Return the exception that came first in the traceback of one that others led to.

    It is ``OSError: [Errno 28] …``; nothing where none led to it, or its text is torn.
    """
    connector = _CONNECTOR.search(text)
    if connector is None:
        return ""
    last = deque(_FRAME_LINE.finditer(text, 0, connector.start()), maxlen=1)
    if not last:
        return ""
    # The source of the frame is indented further than the exception.
    lines = _EXCEPTION_LINE.finditer(text, last[0].end(), connector.start())
    margin = len(last[0].group()) - len(last[0].group().lstrip(" |"))
    own = (m for m in lines if m.start(1) - m.start() < margin)
    return next((m[1] for m in own), "")


# The text of an exception and its traceback.

_LONGEST_PART: Final = 2_000
"""A frame needs 200 characters or less: what is longer is a message, or a line of data."""


def plain(text: str) -> str:
    """Return a text as a plain str, in which what no file can hold (surrogates) is spelt out."""
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or why it cannot be shown."""
    problems: list[BaseException] = []
    with WideGuard(problems.append):  # its own code may raise what it likes
        return plain(str(error))
    return f"(its message cannot be shown: __str__ raised {type(problems[0]).__name__})"


def traceback_of(error: BaseException, trace: TracebackType | None, length: int) -> str:
    """Return the traceback as Python prints it, with huge messages and the middle left out."""
    problems: list[Exception] = []
    with Guard(problems.append):  # causes, notes and names may be of any kind
        parts = traceback.format_exception(type(error), error, trace)
        # A message is one part, and a frame with its source another: no message pushes frames out.
        return shortened("".join(shortened(plain(part), _LONGEST_PART) for part in parts), length)
    place = "".join(traceback.format_tb(trace))
    return shortened(plain(f"{place}(no more can be shown: {type(problems[0]).__name__})"), length)
