"""Which numbers the source of a loss names as coefficients of a balancing loss."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache

from distdiag.coefficient_names import is_coefficient
from distdiag.event import Frame
from distdiag.reasoning.source import module_of

_ARGUMENT = "add_argument"


def coefficients_in(frames: Iterable[Frame]) -> frozenset[float]:
    """Return the literals that the files of these frames give such a name, or multiply by one."""
    files = dict.fromkeys(frame.file for frame in frames if "/torch/" not in frame.file)
    return frozenset(value for file in files for value in _of_file(file))


@lru_cache(maxsize=64)
def _of_file(file: str) -> frozenset[float]:
    tree = module_of(Frame(file, 1, ""))
    named = (*_named(tree), *_multiplied(tree)) if tree is not None else ()
    found = (_number(value) for name, value in named if is_coefficient(name))
    return frozenset(number for number in found if number)


def _number(value: ast.expr | None) -> float:
    """Return a literal, or one that is divided by something."""
    match value:
        case ast.Constant(value=float(number)):
            return number
        case ast.BinOp(left=left, op=ast.Div()):
            return _number(left)
        case _:
            return 0.0


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case ast.AnnAssign(target=target, value=value):
                yield ast.unparse(target), value
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_], keywords=keywords):
                if ast.unparse(func).endswith(_ARGUMENT):
                    yield from ((name, each.value) for each in keywords if each.arg == "default")
            case ast.keyword(arg=str(name), value=value):
                yield name, value
            case ast.Dict(keys=keys, values=values):
                yield from ((ast.unparse(k), v) for k, v in zip(keys, values, strict=True) if k)
            case ast.arguments():
                yield from _defaults(node)


def _multiplied(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                yield ast.unparse(left), right
                yield ast.unparse(right), left


def _defaults(given: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    places = (*given.posonlyargs, *given.args)
    optional = places[len(places) - len(given.defaults) :]
    yield from ((a.arg, v) for a, v in zip(optional, given.defaults, strict=True))
    yield from ((a.arg, v) for a, v in zip(given.kwonlyargs, given.kw_defaults, strict=True))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values):
            yield from ((ast.unparse(n), v) for n, v in zip(names, values, strict=False))
        case _:
            yield ast.unparse(target), value
