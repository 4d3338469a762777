"""Whether code may drop rows of what it has gathered, as far as its text tells."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from distdiag.event import CallSite
from distdiag.reasoning.source import is_readable, module_of, nodes_around

_DROPPING: Final = re.compile(
    r"remainder|samples_seen|seen_samples|dup|dedup|unique|truncate|narrow|islice|^set$|^head$"
    r"|num_pad|padded|^keep$|is_real|real_mask|first_seen",
    re.IGNORECASE,
)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def may_drop(site: CallSite) -> bool:
    """Say whether the functions around a call may drop some of the rows that it returns.

    Seen are those of the stack, those that the innermost one calls by name, and the other methods
    of its class. Where the text cannot be read they may.
    """
    frames = site.user_frames
    if not frames or not all(is_readable(frame) for frame in frames):
        return True
    bodies = [nodes[0] for frame in frames if (nodes := nodes_around(frame))]
    tree = module_of(frames[0])
    near = list(_near(bodies[0], tree)) if bodies and tree is not None else []
    return any(_drops(node) for body in (*bodies, *near) for node in ast.walk(body))


def _near(function: ast.AST, tree: ast.Module) -> Iterator[ast.AST]:
    called = {
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name in called:
            yield node
        elif isinstance(node, ast.ClassDef) and function in node.body:
            yield from (each for each in node.body if isinstance(each, _FUNCTIONS))


def _drops(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(slice=ast.Slice(upper=upper)) if upper is not None:
            return True
        case ast.Subscript(slice=ast.Tuple(elts=[ast.Slice(upper=upper), *_])):
            return upper is not None
        case ast.Subscript(slice=index, ctx=ast.Store()):
            return not isinstance(index, ast.Constant)  # results[number] = answer
        case ast.Subscript(slice=ast.UnaryOp(op=ast.Invert())):
            return True
        case ast.Call(func=ast.Name(id="dict"), args=[ast.Call(func=ast.Name(id="zip"))]):
            return True
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Call(func=ast.Name(id="zip")))]):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(_DROPPING.search(name))
        case _:
            return False
