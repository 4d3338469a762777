"""Whether the line of a call throws its result away."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Final

from distdiag.event import Frame
from distdiag.reasoning.source import nodes_around

_APPLY: Final = "apply"


def is_thrown_away(frames: Iterable[Frame]) -> bool:
    """Say whether `apply` of a function of the program is called for nothing, innermost first.

    What functions return at once is looked for in the line that called them.
    """
    name = _APPLY
    for frame in frames:
        statements = [node for node in nodes_around(frame) if isinstance(node, ast.stmt)]
        match statements[-1] if statements else None:
            case ast.Expr(value=ast.Call(func=func)):
                return _name_of(func) == name
            case ast.Return(value=ast.Call(func=func)) if _name_of(func) == name:
                name = frame.function
            case _:
                return False
    return False


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
