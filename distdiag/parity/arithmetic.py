"""Arithmetic of whole numbers in the templates of arguments, and nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Final

from distdiag.errors import UsageError

_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Return the value of an expression of whole numbers, names, and ``+ - * // %``.

    Raises:
        UsageError: it is something else, or divides by zero.

    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names)
    except (SyntaxError, ZeroDivisionError, _ForbiddenError) as error:
        known = ", ".join(sorted(names))
        raise UsageError(
            f"{{{expression}}} cannot be computed: {error} (there are: {known}; and + - * // %)"
        ) from None


class _ForbiddenError(Exception):
    pass


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise _ForbiddenError(f"{node.id!r} is unknown")
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise _ForbiddenError(f"{ast.unparse(node)!r} is not allowed")
