"""The tracebacks in the text of one process, with the exceptions that led to each of them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from distdiag.dumps.stacks.stack_text import MOST_FRAMES, python_frame
from distdiag.events.base import Frame
from distdiag.record.exception_text import shortened

HEAD: Final = "Traceback (most recent call last):"
MOST_CHARACTERS: Final = 20_000
LONGEST_MESSAGE: Final = 2_000

_FRAME: Final = re.compile(r'\s*File "(.{0,1000}?)", line (\d{1,9})(?:, in (.{1,500}))?$')
# What stands before the lines of an exception group.
_MARGIN: Final = re.compile(r"\s{1,40}\| ")
_EXCEPTION: Final = re.compile(r"([A-Za-z_][\w.]{0,300})(?::\s?(.*))?$")
_CONNECTORS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# A worker's traceback, which the parent's exception carries as a part of its message.
_CARRIED: Final = re.compile(r"\s*(?:Original Traceback|Traceback) \(most recent call last\):$")
# What begins a line of a log that is no continuation of a message.
_LOG_LINE: Final = re.compile(
    r"\[?[IWEF]\d{3,4} |\d{4}-\d\d-\d\d|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[rank|\[[IWEF] "
)
_MOST_MESSAGE_LINES: Final = 20


@dataclass
class Block:
    """One traceback. `type` is empty where the text ends, or is torn, before the exception."""

    type: str = ""
    message: str = ""
    frames: list[Frame] = field(default_factory=list)


@dataclass
class Chain:
    """An exception with those that led to it; `last` is the one that was not caught.

    `before` is the line that came before the first traceback, `num_after` counts those after the
    whole, up to the next one.
    """

    before: str
    last: Block = field(default_factory=Block)
    text: list[str] = field(default_factory=list)
    num_after: int = 0


class _Cursor:
    """Lines with a look at the next one."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.line = next(lines, None)

    def take(self) -> str:
        assert self.line is not None
        taken, self.line = self.line, next(self._lines, None)
        return taken


def chains(lines: Iterator[str], *, is_pure: bool) -> Iterator[Chain]:
    """Yield the tracebacks of one process in order.

    `is_pure` says that the lines are known to be one process's: what follows an exception is then
    the rest of its message, up to a line of a log.
    """
    cursor = _Cursor(lines)
    chain: Chain | None = None
    before = ""
    while cursor.line is not None:
        if HEAD in cursor.line:
            if chain is not None:
                yield chain
            chain = _chain(cursor, before, is_pure=is_pure)
            before = ""
            continue
        before = cursor.take()
        if chain is not None:
            chain.num_after += 1
    if chain is not None:
        yield chain


def text_of(lines: Iterable[str]) -> str:
    """Return the text of a traceback that is not too long and still has its end."""
    # A line of this length is a message; it must not push the frames out.
    text = "\n".join(shortened(line, LONGEST_MESSAGE) for line in lines)
    return shortened(text, MOST_CHARACTERS)


def _chain(cursor: _Cursor, before: str, *, is_pure: bool) -> Chain:
    chain = Chain(before)
    while True:
        block = _block(cursor, chain.text)
        chain.last = block
        if block.type:
            _rest_of_message(cursor, block, chain.text, is_pure=is_pure)
        if cursor.line is None or cursor.line.strip(" |+-") not in _CONNECTORS:
            return chain
        chain.text.append(cursor.take())
        if cursor.line is None or HEAD not in cursor.line:
            return chain


def _block(cursor: _Cursor, text: list[str]) -> Block:
    """Read one traceback: its head, frames with their source, and the line of the exception."""
    head = cursor.take()
    text.append(head[head.index(HEAD) :])
    block = Block()
    while cursor.line is not None and HEAD not in cursor.line:
        line = _without_margin(cursor.line)
        match = _FRAME.match(line)
        if match is None and not line.startswith("  "):
            if exception := _EXCEPTION.match(line.strip()):
                text.append(cursor.take())
                block.type, block.message = exception[1], (exception[2] or "").strip()
            return _innermost_first(block)
        text.append(cursor.take())
        if match is not None and match[3] is not None:
            block.frames.append(python_frame(*match.groups()))
            # The innermost ones, which the text names last, are those to keep.
            del block.frames[: -2 * MOST_FRAMES]
    return _innermost_first(block)


def _without_margin(line: str) -> str:
    match = _MARGIN.match(line)
    return line[match.end() :] if match else line


def _innermost_first(block: Block) -> Block:
    block.frames = block.frames[: -MOST_FRAMES - 1 : -1]
    return block


def _rest_of_message(cursor: _Cursor, block: Block, text: list[str], *, is_pure: bool) -> None:
    for _ in range(_MOST_MESSAGE_LINES):
        line = cursor.line
        if line is None or line.strip() in _CONNECTORS:
            break
        if _CARRIED.match(line) and block.message.startswith("Caught "):
            carried = _block(cursor, text)
            block.message += f" ({carried.type}: {carried.message})"
        elif not is_pure or HEAD in line or _LOG_LINE.match(line):
            break
        else:
            text.append(cursor.take())
            block.message += "\n" + line
    block.message = shortened(block.message, LONGEST_MESSAGE)
