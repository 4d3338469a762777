"""What a name stands for: the one value that it was given, if it was given one only."""

import ast
from collections.abc import Iterator
from functools import lru_cache

from distdiag.lint.modules import Class, Function, Module, statements


def value_of(expr: ast.expr, function: Function) -> ast.expr | None:
    """Return the value of a name or of an attribute of self, None where it is not known."""
    if isinstance(expr, ast.Name):
        return _value_of_name(expr.id, function)
    if function.owner is None or not isinstance(expr, ast.Attribute):
        return None
    if not isinstance(expr.value, ast.Name) or expr.value.id != "self":
        return None
    values = _attributes(function.module, function.owner).get(expr.attr, ())
    return values[0] if len(values) == 1 else None


def is_rebound(name: str, function: Function) -> bool:
    """Say whether a name is the item of a loop, or one of several values, in its function."""
    values = _bound(function).get(name, ())
    return len(values) > 1 or None in values


def _value_of_name(name: str, function: Function) -> ast.expr | None:
    scope: Function | None = function
    while scope is not None:
        values = _bound(scope).get(name)
        if values is not None:
            return values[0] if len(values) == 1 else None
        if name in scope.parameters:
            return None
        scope = scope.outer
    return None


@lru_cache(maxsize=100_000)
def _bound(function: Function) -> dict[str, list[ast.expr | None]]:
    found: dict[str, list[ast.expr | None]] = {}
    for node in statements(function.node):
        for target, value in _bindings(node):
            for name, part in _unpacked(target, value):
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(part)
    return found


@lru_cache(maxsize=100_000)
def _attributes(module: Module, owner: Class) -> dict[str, list[ast.expr | None]]:
    found: dict[str, list[ast.expr | None]] = {}
    for function in module.functions:
        if function.owner is None or function.owner is not owner:
            continue
        for node in statements(function.node):
            for target, value in _bindings(node):
                for name, part in _unpacked(target, value):
                    if isinstance(name, ast.Attribute):
                        found.setdefault(name.attr, []).append(part)
    return found


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield target, value
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.AsyncFor(target=target):
            yield target, None
        case ast.With(items=items) | ast.AsyncWith(items=items):
            yield from ((item.optional_vars, None) for item in items if item.optional_vars)
        case _:
            pass


def _unpacked(
    target: ast.expr, value: ast.expr | None
) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    parts: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts):
        parts = list(value.elts)
    for name, part in zip(target.elts, parts, strict=True):
        yield from _unpacked(name, part)
