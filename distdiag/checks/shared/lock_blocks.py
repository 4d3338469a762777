"""Which lock a line of the program takes, and whether a stack stands inside of a block with it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from distdiag.events.base import Frame
from distdiag.findings.source import nodes_around

_WITH = (ast.With, ast.AsyncWith)


def awaited_lock(frames: tuple[Frame, ...]) -> str:
    """Return the text of the lock that the innermost frame takes, such as ``self._lock``.

    Empty where that frame is not the user's own: a lock of `threading` is taken in C, and any other
    wait has a frame of Python inside.
    """
    if not frames or not frames[0].user:
        return ""
    line = frames[0].line
    for node in reversed(nodes_around(frames[0])):
        if isinstance(node, _WITH):
            taken = [i.context_expr for i in node.items if _is_at(i.context_expr, line)]
            if taken and not _is_in_body(node, line):
                return ast.unparse(taken[-1])
        elif isinstance(node, ast.Call) and _method(node) == "acquire":
            return _owner(node)
    return ""


def frame_with_lock(frames: Iterable[Frame], lock: str, file: str) -> Frame | None:
    """Return the innermost frame of the user's that stands where this lock of a file is held.

    A lock is known by its text, or by the name of its attribute: ``self.lock`` and ``images.lock``
    may be one. In another file the same name is mostly that of another lock.
    """
    mine = (frame for frame in frames if frame.user and frame.file == file)
    return next((f for f in mine if any(_is_same(lock, text) for text in _held_at(f))), None)


def _held_at(frame: Frame) -> Iterator[str]:
    """Yield the locks that are held at a line, as far as its function shows that."""
    around = nodes_around(frame)
    for node in around:
        if isinstance(node, _WITH) and _is_in_body(node, frame.line):
            yield from (ast.unparse(item.context_expr) for item in node.items)
    calls = [c for c in ast.walk(around[0]) if isinstance(c, ast.Call)] if around else []
    before = [c for c in calls if c.lineno < frame.line]
    for call in before:
        if _method(call) == "acquire":
            lock = _owner(call)
            released = (c for c in before if _method(c) == "release" and _owner(c) == lock)
            if not any(c.lineno > call.lineno for c in released):
                yield lock


def _is_same(one: str, other: str) -> bool:
    are_attributes = "." in one and "." in other
    return one == other or (are_attributes and one.split(".")[-1] == other.split(".")[-1])


def _is_at(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_in_body(node: ast.With | ast.AsyncWith, line: int) -> bool:
    last = node.body[-1]
    return node.body[0].lineno <= line <= (last.end_lineno or last.lineno)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
