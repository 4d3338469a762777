"""Walk through syntax trees faster than `ast` does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Fields that hold no expressions and no statements.
_OTHER_FIELDS: Final = frozenset(
    {
        "ctx",
        "op",
        "ops",
        "id",
        "attr",
        "arg",
        "names",
        "kind",
        "type_comment",
        "level",
        "conversion",
    }
)
_BLOCKS: Final = ("body", "orelse", "handlers", "finalbody", "cases")


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions and statements directly below a node, in the order of the source."""
    for name in node._fields:
        if name in _OTHER_FIELDS:
            continue
        value = getattr(node, name)
        if type(value) is list:
            for item in value:
                if isinstance(item, ast.AST):
                    yield item
        elif isinstance(value, ast.AST):
            yield value


def all_nodes(top: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node, in no particular order."""
    stack = [top]
    while stack:
        for child in children(stack.pop()):
            yield child
            stack.append(child)


def statements(top: ast.AST, *, nested: bool = False) -> Iterator[ast.AST]:
    """Yield the statements below a node, with `nested` also those of functions defined there.

    The handlers of a try and the cases of a match are among them.
    """
    stack = [top]
    while stack:
        for child in child_statements(stack.pop()):
            yield child
            if nested or not isinstance(child, _FUNCTIONS):
                stack.append(child)


def child_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements, handlers and cases directly below a node."""
    for name in _BLOCKS:
        block = getattr(node, name, None)
        if type(block) is list:
            yield from block
