"""What a condition is on each rank, as far as the source tells."""

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from distdiag.frameworks.rank_names import (
    RANKS_PER_NODE,
    is_global_rank,
    last_name,
    value_by_name,
    value_of_variable,
)
from distdiag.lint.bindings import is_rebound, value_of
from distdiag.lint.modules import Function

_MAX_DEPTH: Final = 16
_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_OPERATIONS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_CONVERSIONS: Final[dict[str, Callable[[Any], object]]] = {"int": int, "bool": bool, "str": str}
_WORLD: Final = frozenset({"None", "dist.group.WORLD"})


class Unknown:
    """A value that the source does not tell."""


UNKNOWN: Final = Unknown()


@dataclass(frozen=True, slots=True)
class RankView:
    """How one rank sees the expressions of a function.

    `group` is the text of a process group: then only the rank in that group counts as a rank. None
    is the group of all ranks.
    """

    rank: int
    function: Function
    group: str | None = None

    def truth(self, expr: ast.expr) -> bool | None:
        """Return whether the expression is true on this rank, None where that is not known."""
        value = self._value(expr, 0)
        return None if isinstance(value, Unknown) else bool(value)

    def _value(self, expr: ast.expr, depth: int) -> object:
        if depth > _MAX_DEPTH:
            return UNKNOWN
        match expr:
            case ast.Constant():
                return expr.value
            case ast.Tuple() | ast.List() | ast.Set():
                values = [self._value(part, depth + 1) for part in expr.elts]
                return UNKNOWN if UNKNOWN in values else values
            case ast.UnaryOp() | ast.BinOp() | ast.BoolOp() | ast.Compare():
                return self._operation(expr, depth + 1)
            case ast.Name() | ast.Attribute():
                return self._name(expr, depth + 1)
            case ast.Call():
                return self._call(expr, depth + 1)
            case ast.Subscript(value=table, slice=ast.Constant(value=str() as name)):
                return self._variable(name) if "environ" in ast.unparse(table) else UNKNOWN
            case _:
                return UNKNOWN

    def _operation(
        self, expr: ast.UnaryOp | ast.BinOp | ast.BoolOp | ast.Compare, depth: int
    ) -> object:
        match expr:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._value(operand, depth)
                return UNKNOWN if isinstance(value, Unknown) else not value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
                return -number
            case ast.BinOp(left=left, op=op, right=right):
                sides = self._value(left, depth), self._value(right, depth)
                return _apply(_OPERATIONS.get(type(op)), *sides)
            case ast.BoolOp(op=op, values=parts):
                return self._junction(parts, depth, ends_with=isinstance(op, ast.Or))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._comparison(op, left, right, depth)
            case _:
                return UNKNOWN

    def _junction(self, parts: Sequence[ast.expr], depth: int, *, ends_with: bool) -> object:
        values = [self._value(part, depth) for part in parts]
        if ends_with in (bool(value) for value in values if not isinstance(value, Unknown)):
            return ends_with
        return UNKNOWN if UNKNOWN in values else not ends_with

    def _comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr, depth: int) -> object:
        values = self._value(left, depth), self._value(right, depth)
        if UNKNOWN not in values:
            return _apply(_COMPARISONS.get(type(op)), *values)
        known = left if values[0] is not UNKNOWN else right
        if self.rank not in values or not is_global_rank(known):
            return UNKNOWN
        if isinstance(op, ast.Eq | ast.In | ast.NotEq | ast.NotIn):
            # Which ranks are meant is not known. Some are and some are not: let it be rank 1.
            return (self.rank == 1) == isinstance(op, ast.Eq | ast.In)
        return UNKNOWN

    def _name(self, expr: ast.Name | ast.Attribute, depth: int) -> object:
        bound = value_of(expr, self.function)
        value = self._value(bound, depth) if bound is not None else UNKNOWN
        if not isinstance(value, Unknown):
            return value
        if isinstance(expr, ast.Name) and is_rebound(expr.id, self.function):
            return UNKNOWN
        return self._by_name(expr)

    def _call(self, call: ast.Call, depth: int) -> object:
        name = last_name(call.func)
        if name in _CONVERSIONS and len(call.args) == 1:
            return _converted(_CONVERSIONS[name], self._value(call.args[0], depth))
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name == "getenv" or (name == "get" and "environ" in ast.unparse(call.func)):
            is_named = bool(given) and isinstance(given[0], ast.Constant)
            return self._variable(str(given[0].value)) if is_named else UNKNOWN  # type: ignore[attr-defined]
        return self._in_group(call, given) if given else self._by_name(call.func)

    def _by_name(self, expr: ast.expr) -> object:
        if self.group is not None:
            return self.rank if ast.unparse(expr) == f"{self.group}.rank" else UNKNOWN
        value = value_by_name(expr, self.rank)
        return UNKNOWN if value is None else value

    def _in_group(self, call: ast.Call, given: Sequence[ast.expr]) -> object:
        """Return the value of a call such as ``get_rank(group)``."""
        if len(given) != 1 or not is_global_rank(call):
            return UNKNOWN
        text = ast.unparse(given[0])
        if self.group is not None:
            return self.rank if text == self.group else UNKNOWN
        return self.rank if text in _WORLD else self.rank % RANKS_PER_NODE

    def _variable(self, name: str) -> object:
        value = value_of_variable(name, self.rank) if self.group is None else None
        return UNKNOWN if value is None else value


def _apply(function: Callable[[Any, Any], Any] | None, left: object, right: object) -> object:
    if function is None or UNKNOWN in (left, right):
        return UNKNOWN
    try:
        return function(left, right)
    except (TypeError, ValueError, ArithmeticError, MemoryError):
        return UNKNOWN


def _converted(function: Callable[[Any], object], value: object) -> object:
    if isinstance(value, Unknown):
        return UNKNOWN
    try:
        return function(value)
    except (TypeError, ValueError):
        return UNKNOWN
