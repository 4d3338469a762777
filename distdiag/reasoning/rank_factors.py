"""Whether a program multiplies a loss by a number of ranks, as far as its source shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

from distdiag.event import Frame
from distdiag.reasoning.source import module_of

_AXES: Final = "dp|tp|sp|cp|pp|ep|data|tensor|sequence|context|model|pipeline|expert|ulysses|ring"
_COUNT: Final = re.compile(
    r"(^|_)(world|worldsize|n_?gpus?|num_(ranks|processes|procs|replicas|gpus|devices)|nproc)(_|$)"
    rf"|(^|_)({_AXES})(_\w+)?_(size|degree)$",
    re.IGNORECASE,
)
_GROUP: Final = re.compile(r"group|mesh|(^|_)pg(_|$)", re.IGNORECASE)
_LOSS: Final = re.compile(r"loss|nll|entropy|objective|total|out|err", re.IGNORECASE)
_PRODUCTS: Final = ("mul", "mul_", "multiply", "multiply_")


def is_number_of_ranks(frames: Iterable[Frame], factor: float) -> bool:
    """Say whether a loss is multiplied by a count of ranks there, and none by a literal `factor`.

    The files of the frames are read, and what they import from beside them.
    """
    found = [each for frame in frames if "/torch/" not in frame.file for each in _factors_at(frame)]
    literals = {each.value for each in found if isinstance(each, ast.Constant)}
    return factor not in literals and any(not isinstance(each, ast.Constant) for each in found)


@lru_cache(maxsize=64)
def _factors_at(frame: Frame) -> tuple[ast.expr, ...]:
    tree = module_of(frame)
    if tree is None:
        return ()
    folder = Path(frame.file).parent
    beside = [folder / f"{name.replace('.', '/')}.py" for name in _imports(tree)]
    trees = [tree, *(module_of(Frame(str(path), 1, "")) for path in beside if path.is_file())]
    return tuple(factor for each in trees if each is not None for factor in _factors_in(each))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level < 2:
            yield node.module


def _factors_in(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the literals and counts of ranks by which losses are multiplied."""
    names = _counting_names(tree)
    for whole, operands in _products(tree):
        for operand in operands:
            rest = [each for each in (*whole, *operands) if each is not operand]
            is_factor = isinstance(operand, ast.Constant) or _counts(operand, names)
            if is_factor and any(_LOSS.search(name) for each in rest for name in _names_in(each)):
                yield operand


def _products(tree: ast.Module) -> Iterator[tuple[list[ast.expr], list[ast.expr]]]:
    """Yield what is multiplied, with what it is assigned to if that is known."""
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign(target=target, op=ast.Mult(), value=value):
                yield [], [target, value]
            case ast.Assign(targets=targets, value=ast.BinOp(ast.expr() as one, ast.Mult(), other)):
                yield targets, [one, other]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                yield [], [left, right]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args):
                if name in _PRODUCTS:
                    yield [], [value, *args]


def _counting_names(tree: ast.Module) -> frozenset[str]:
    """Return what is assigned a count of ranks."""
    return frozenset(
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _counts(node.value, frozenset())
        for target in node.targets
    )


def _counts(value: ast.expr, names: frozenset[str]) -> bool:
    """Say whether a number is one of ranks, by the names that it is made of."""
    match value:
        case ast.Call(func=ast.Attribute(value=owner, attr="size")):
            return any(_GROUP.search(name) for name in _names_in(owner))
        case ast.Call(func=ast.Name(id="int" | "float" | "min" | "max")):
            return any(_counts(each, names) for each in value.args)
        case ast.Call(func=func):
            return _counts(func, names) or "WORLD_SIZE" in ast.unparse(value)
        case ast.Name() | ast.Attribute():
            last = value.id if isinstance(value, ast.Name) else value.attr
            return bool(_COUNT.search(last)) or ast.unparse(value) in names
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.FloorDiv()):
            return _counts(left, names)
        case ast.IfExp(body=body, orelse=other):
            return _counts(body, names) or _counts(other, names)
        case ast.Subscript():
            return "WORLD_SIZE" in ast.unparse(value)
        case _:
            return False


def _names_in(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
