"""The tracebacks in the text of one process, with the exceptions that led to each of them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from distdiag.dumps.stacks.stack_text import MOST_FRAMES, python_frame
from distdiag.events.base import Frame
from distdiag.record.exception_text import shortened

HEAD: Final = "Traceback (most recent call last)"
"""A colon follows, or the edge of the box that rich draws."""
BOX_HEAD: Final = f"╭── {HEAD} ──╮"
BOX_END: Final = "╰──"
MOST_CHARACTERS: Final = 20_000
LONGEST_MESSAGE: Final = 2_000

# loguru marks the frame that caught the exception.
_FRAME: Final = re.compile(r'[\s>]*File "(.{0,1000}?)", line (\d{1,9})(?:, in (.{1,500}))?$')
# The exception at the end of a traceback of which the head was cut off: then the name must say it.
NAMED_EXCEPTION: Final = re.compile(r"[\w.]{0,200}(?:Error|Exception|Interrupt)$")
# What stands before the lines of an exception group.
_MARGIN: Final = re.compile(r"\s{1,40}\| ")
# One without a message is a name as classes have it; other words may be half a prefix.
_EXCEPTION: Final = re.compile(
    r"((?:\w{1,100}\.){0,20}[A-Z_]\w{0,200}(?=$)|[A-Za-z_][\w.]{0,300}(?=:))(?::\s?(.*))?$"
)
# Ray: the exception of a worker, with the worker; its traceback follows without a head.
_RAY: Final = re.compile(
    r"ray\.exceptions\.RayTaskError(?:\(([\w.]{1,200})\))?: (ray::.{1,400}?\(pid=.{1,300})$"
)
_CONNECTORS: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# A worker's traceback, which the parent's exception carries as a part of its message.
_CARRIED: Final = re.compile(
    r"\s*(?:Original Traceback|Traceback) \(most recent call last\):(?: \(RANK \d{1,6}\)\s*)?$"
)
_CARRIES: Final = ("Caught ", "CheckpointException ranks:")
# What begins a line of a log that is no continuation of a message.
LOG_LINE: Final = re.compile(
    r"\[?[IWEF]\d{3,4} |\[?\d{4}-\d\d-\d\d|\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\[rank"
    r"|\[[IWEF] |srun: |slurmstepd: |Root Cause \(|-{10}|={10}"
)
# What Python draws below the source of a frame: ``    ~~~^^^``, and what loguru draws there.
_DRAWN: Final = re.compile(r"\s*[│└├].{0,300}$|\s*[\^~ ]+$|\s*\.\.\.<\d+ lines>\.\.\.$")
_MOST_MESSAGE_LINES: Final = 20


@dataclass
class Block:
    """One traceback. `type` is empty where the text ends, or is torn, before the exception.

    `worker` is whose exception it is where a driver passes it on: ``W pid=31, ip=10.0.0.1``.
    """

    type: str = ""
    message: str = ""
    frames: list[Frame] = field(default_factory=list)
    worker: str = ""


@dataclass
class Chain:
    """An exception with those that led to it; `last` is the one that was not caught.

    `before` is the line that came before the first traceback, `start` the number of the line with
    its head, `raised` that of the line after the exception's own, and `end` that of the line after
    the rest of its message, counted from 0.
    """

    before: str
    start: int = 0
    last: Block = field(default_factory=Block)
    text: list[str] = field(default_factory=list)
    raised: int = 0
    end: int = 0


class _Cursor:
    """Lines with a look at the next one."""

    def __init__(self, lines: Iterator[str], index: int = 0) -> None:
        self._lines = lines
        self.line = next(lines, None)
        self.index = index
        self.indent = 0

    def take(self) -> str:
        assert self.line is not None
        taken, self.line = self.line[self._margin(self.line) :], next(self._lines, None)
        self.index += 1
        return taken

    @property
    def inner(self) -> str:
        """The next line without the indentation of the traceback as a whole."""
        line = self.line or ""
        return line[self._margin(line) :]

    def _margin(self, line: str) -> int:
        return self.indent if line[: self.indent].isspace() else 0


def chains(lines: Iterator[str], *, is_pure: bool) -> Iterator[Chain]:
    """Yield the tracebacks of one process in order.

    `is_pure` says that the lines are known to be one process's: what follows an exception is then
    the rest of its message, up to a line of a log.
    """
    cursor = _Cursor(lines)
    before = ""
    while cursor.line is not None:
        if HEAD in cursor.line:
            yield _chain(cursor, before, is_pure=is_pure)
            before = ""
        else:
            before = cursor.take()


def chain_at(
    lines: Iterator[str], before: str, start: int, *, is_pure: bool, head: str = ""
) -> Chain:
    """Return the traceback that begins with these lines; its head is the process's line `start`.

    `head` stands for one that was cut off: `HEAD`, or `BOX_HEAD` where rich drew the rest.
    """
    return _chain(_Cursor(lines, start), before, is_pure=is_pure, head=head)


def text_of(lines: Iterable[str]) -> str:
    """Return the text of a traceback that is not too long and still has its end."""
    # A line of this length is a message; it must not push the frames out.
    text = "\n".join(shortened(line, LONGEST_MESSAGE) for line in lines)
    return shortened(text, MOST_CHARACTERS)


def _chain(cursor: _Cursor, before: str, *, is_pure: bool, head: str = "") -> Chain:
    chain = Chain(before, cursor.index)
    while True:
        block = _block(cursor, chain.text, head)
        head = ""
        chain.last = block
        chain.raised = cursor.index
        if block.type:
            _rest_of_message(cursor, block, chain.text, is_pure=is_pure)
        chain.end = cursor.index
        if cursor.line is None or cursor.line.strip(" |+-") not in _CONNECTORS:
            return chain
        chain.text.append(cursor.take())
        if cursor.line is None or HEAD not in cursor.line:
            return chain


def _block(cursor: _Cursor, text: list[str], head: str = "") -> Block:
    """Read one traceback: its head, frames with their source, and the line of the exception."""
    head = head or cursor.take()
    block = Block()
    if _BOX_EDGE.search(head):
        text.append(f"{HEAD}:")
        _box(cursor, text, block)
    else:
        text.append(head[head.index(HEAD) :])
        cursor.indent = _indent(head)
    _frames(cursor, text, block)
    cursor.indent = 0
    # The innermost ones, which the text names last, are those to keep.
    block.frames = block.frames[: -MOST_FRAMES - 1 : -1]
    return block


def _frames(cursor: _Cursor, text: list[str], block: Block) -> None:
    """Read frames up to the line of the exception."""
    while cursor.line is not None and HEAD not in cursor.line:
        line = _without_margin(cursor.inner)
        match = _FRAME.match(line)
        if match is None and not (line[:1].isspace() or _DRAWN.match(line)):
            _exception(cursor, text, block, line.strip())
            return
        text.append(cursor.take())
        if match is not None and match[3] is not None:
            block.frames.append(python_frame(*match.groups()))
            del block.frames[: -2 * MOST_FRAMES]


def _exception(cursor: _Cursor, text: list[str], block: Block, line: str) -> None:
    if match := _RAY.match(line):
        text.append(cursor.take())
        outer, block.frames = block.frames, []
        block.worker = _worker(match[2])
        _frames(cursor, text, block)
        block.frames = block.frames or outer
        if not block.type:
            block.type, block.message = match[1] or "RayTaskError", match[2]
    elif match := _EXCEPTION.match(line):
        text.append(cursor.take())
        block.type, block.message = match[1], (match[2] or "").strip()


def _worker(call: str) -> str:
    """Return the name of a worker of Ray, of ``ray::W.f() (pid=31, ip=10.0.0.1, …)``."""
    name = re.match(r"ray::([\w]{1,80})", call)
    place = re.search(r"\(pid=(\d{1,9})(?:, ip=([\w.:-]{1,60}))?", call)
    parts = [f"pid={place[1]}", *([f"ip={place[2]}"] if place[2] else [])] if place else []
    return f"{name[1] if name else 'worker'} {', '.join(parts)}".strip()


# The box that rich draws: ``│ /home/me/train.py:9 in <module> │``, and source between the frames.

_BOX_EDGE: Final = re.compile(r"[╭┌+][─-]{2,}.{0,40}Traceback")
_BOXED: Final = re.compile(r"\s*[│|] ?(.*?)\s*[│|]?$")
_BOX_END: Final = re.compile(r"\s*[╰└+][─-]{2,}")
_BOX_FRAME: Final = re.compile(
    r"(/.{1,1000}?|\S.{0,1000}?\.py|<.{1,60}>):(\d{1,9}) in (\S{1,500})$"
)
_MOST_BOX_LINES: Final = 5_000


def _box(cursor: _Cursor, text: list[str], block: Block) -> None:
    broken = ""  # a path that was too long for the box
    for _ in range(_MOST_BOX_LINES):
        if cursor.line is None or HEAD in cursor.line:
            return
        line = cursor.take()
        if _BOX_END.match(line):
            return
        match = _BOXED.match(line)
        inner = match[1] if match else line.strip()
        wholes = (inner, broken + inner, f"{broken} {inner}")
        frame = next((m for whole in wholes if (m := _BOX_FRAME.match(whole))), None)
        if frame is not None:
            file, number, function = frame.groups()
            block.frames.append(python_frame(file, number, function))
            text.append(f'  File "{file}", line {number}, in {function}')
            broken = ""
        elif inner.startswith("/"):
            broken = inner
        else:
            broken = (broken + inner)[:LONGEST_MESSAGE] if broken and inner else ""


def _indent(head: str) -> int:
    """Return how far all lines of a traceback are indented, by the line of its head."""
    before = head[: head.index(HEAD)]
    if before.strip() == "traceback :":  # in torchrun's summary
        before = before[: before.index("t")]
    return len(before) if before.isspace() else 0


def _without_margin(line: str) -> str:
    match = _MARGIN.match(line)
    return line[match.end() :] if match else line


def _rest_of_message(cursor: _Cursor, block: Block, text: list[str], *, is_pure: bool) -> None:
    for _ in range(_MOST_MESSAGE_LINES):
        line = cursor.line
        if line is None or line.strip() in _CONNECTORS:
            break
        # The lines in which NCCL says what was wrong follow, whoever writes between them.
        is_ours = (
            is_pure
            or _NCCL_REST.match(line) is not None
            or (block.message.endswith("Last error:") and not LOG_LINE.match(line))
        )
        if _CARRIED.match(line) and block.message.startswith(_CARRIES):
            carried = _block(cursor, text)
            block.message += f" ({carried.type}: {carried.message})"
        elif not is_ours or HEAD in line or (LOG_LINE.match(line) and not _NCCL_REST.match(line)):
            break
        else:
            text.append(cursor.take())
            block.message += "\n" + line
    block.message = shortened(block.message, LONGEST_MESSAGE)


# NCCL, and torch_npu with HCCL, say on lines of their own what was wrong.
_NCCL_REST: Final = re.compile(
    r"nccl[A-Z]\w{3,30}Error: |Last error:"
    r"|\[ERROR\] \d{4}-.{1,80}\bERR\d{5} |\[Error\]: |E[A-Z]\d{4}: "
)
