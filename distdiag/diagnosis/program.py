"""The model's code as the rules see it: calls with the loops and functions around them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from distdiag.diagnosis.causes import Evidence
from distdiag.diagnosis.documents import Document, short_of
from distdiag.events.errors import DamagedFileError
from distdiag.lint.bindings import is_rebound, value_of
from distdiag.lint.modules import MAX_BYTES, Function, Module, all_nodes, parse

_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_OPTIMIZERS: Final = ("adam", "sgd", "rmsprop", "adagrad", "lion", "lamb", "adafactor", "muon")


@dataclass(frozen=True, eq=False)
class Code:
    """One file of the program."""

    document: Document
    module: Module

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """What each node stands in."""
        found: dict[ast.AST, ast.AST] = {}
        for top in (self.module.tree, *all_nodes(self.module.tree)):
            for child in ast.iter_child_nodes(top):
                found[child] = top
        return found

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes, by line."""
        found = [node for node in all_nodes(self.module.tree) if hasattr(node, "lineno")]
        return tuple(sorted(found, key=lambda n: (n.lineno, n.col_offset)))  # type: ignore[attr-defined]

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """All calls, by line."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node stands in, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def loops(self, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
        """Return the loops around a node within its function, innermost first."""
        found: list[ast.For | ast.AsyncFor | ast.While] = []
        for outer in self.around(node):
            if isinstance(outer, _SCOPES):
                break
            if isinstance(outer, _LOOPS):
                found.append(outer)
        return found

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or module whose code a node is."""
        return next((o for o in self.around(node) if isinstance(o, _SCOPES)), self.module.tree)

    def function(self, node: ast.AST) -> Function:
        """Return the function that a node stands in, as lint sees it."""
        by_node = self._functions
        for outer in self.around(node):
            if outer in by_node:
                return by_node[outer]
        return self.module.body

    @cached_property
    def _functions(self) -> dict[ast.AST, Function]:
        return {function.node: function for function in self.module.functions}

    def value(self, expr: ast.expr) -> ast.expr | None:
        """Return the one value that a name, or an attribute of self, was given."""
        return value_of(expr, self.function(expr))

    def is_rebound(self, name: ast.Name) -> bool:
        """Say whether a name has several values."""
        return is_rebound(name.id, self.function(name))

    def evidence(self, node: ast.AST) -> Evidence:
        """Return a line of the file as evidence."""
        line = getattr(node, "lineno", 1)
        return Evidence(
            artifact=self.document.artifact,
            source=self.document.name,
            line=line,
            quote=short_of(self.module.lines[line - 1]),
        )


@dataclass(frozen=True, eq=False)
class Program:
    """All files of the model's code that could be parsed, and one line for each that could not."""

    codes: tuple[Code, ...]
    problems: tuple[str, ...]

    @cached_property
    def tails(self) -> frozenset[str]:
        """The last names of everything that is called anywhere."""
        return frozenset(tail(call) for code in self.codes for call in code.calls)

    @cached_property
    def text(self) -> str:
        """All source, in small letters."""
        return "\n".join(code.module.lowered for code in self.codes)

    def calls(self, *tails: str) -> Iterator[tuple[Code, ast.Call]]:
        """Yield the calls whose last name is one of these."""
        for code in self.codes:
            yield from ((code, call) for call in code.calls if tail(call) in tails)

    @cached_property
    def _bodies(self) -> dict[str, list[ast.AST]]:
        found: dict[str, list[ast.AST]] = {}
        for code in self.codes:
            for function in code.module.functions:
                found.setdefault(function.name, []).append(function.node)
        return found

    def reach(self, node: ast.AST) -> frozenset[str]:
        """Return the last names of what is called below a node, also in functions of the program.

        Functions are taken by their names: what may be called counts as called.
        """
        seen: set[str] = set()
        stack = [node]
        while stack:
            for below in all_nodes(stack.pop()):
                if isinstance(below, ast.Call) and (name := tail(below)) not in seen:
                    seen.add(name)
                    stack += self._bodies.get(name, ())
        return frozenset(seen)


def read_program(documents: Iterable[Document]) -> Program:
    """Parse the Python files among the documents; nothing is imported or run."""
    codes: list[Code] = []
    problems: list[str] = []
    for document in documents:
        text = document.text
        if not text.strip():
            continue
        if len(text) > MAX_BYTES:
            problems.append(f"{document.name}: larger than {MAX_BYTES} bytes")
            continue
        try:
            codes.append(Code(document, parse(Path(document.name), text)))
        except DamagedFileError as error:
            problems.append(str(error))
    return Program(tuple(codes), tuple(problems))


# Words for what rules ask of expressions.


def tail(call: ast.Call) -> str:
    """Return the last name of what is called: ``step`` of ``self.optimizer.step()``."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def receiver(call: ast.Call) -> ast.expr | None:
    """Return what a method is called on."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def dotted(expr: ast.AST | None) -> str:
    """Return ``self.net.head`` for such an expression, "" for others."""
    parts: list[str] = []
    while isinstance(expr, ast.Attribute):
        parts.append(expr.attr)
        expr = expr.value
    if not isinstance(expr, ast.Name):
        return ""
    return ".".join([expr.id, *reversed(parts)])


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword of a call."""
    return next((given.value for given in call.keywords if given.arg == name), None)


def is_optimizer(code: Code, expr: ast.expr | None) -> bool:
    """Whether an expression is an optimizer, by what it was made of or by its name."""
    if expr is None:
        return False
    made = code.value(expr)
    if isinstance(made, ast.Call):
        return is_optimizer_class(code, made)
    name = dotted(expr).rpartition(".")[2].lower()
    return name.startswith(("optim", "opt_")) or name == "opt" or name.endswith("optimizer")


def is_optimizer_class(code: Code, call: ast.Call) -> bool:
    """Whether a call makes an optimizer."""
    full = code.module.full_name(call.func).lower()
    last = full.rpartition(".")[2]
    return any(word in last for word in _OPTIMIZERS) and "config" not in last


def batch_loop(code: Code, node: ast.AST) -> ast.For | ast.AsyncFor | ast.While | None:
    """Return the innermost loop around a node within its function."""
    loops = code.loops(node)
    return loops[0] if loops else None


def positional(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """Return an argument that may be given by place or by name."""
    if place < len(call.args) and not isinstance(call.args[place], ast.Starred):
        return call.args[place]
    return keyword(call, name)


# What names hold, and what models give.

_WRAPPERS: Final = (
    "compile",
    "DataParallel",
    "DistributedDataParallel",
    "DDP",
    "FSDP",
    "FullyShardedDataParallel",
    "prepare",
    "prepare_model",
)
_RESHAPING: Final = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "contiguous",
    "float",
    "squeeze",
    "unsqueeze",
    "flatten",
    "to",
    "cuda",
    "cpu",
    "half",
    "bfloat16",
    "double",
    "train",
)


def last_value(code: Code, name: ast.Name) -> ast.expr | None:
    """Return the value that a name was given last before it is used, None where that may vary."""
    scope = code.scope(name)
    outer = set(code.around(name))
    before = [
        node
        for node in all_nodes(scope)
        if isinstance(node, ast.Name)
        and node.id == name.id
        and isinstance(node.ctx, ast.Store)
        and (node.lineno, node.col_offset) < (name.lineno, name.col_offset)
        and code.scope(node) is scope
        and code.parents.get(node) not in outer  # x = f(x): the value before
    ]
    if not before:
        return None
    last = max(before, key=lambda node: (node.lineno, node.col_offset))
    statement = code.parents.get(last)
    holder = code.parents.get(statement) if statement is not None else None
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or holder not in outer | {scope}:
        return None
    return statement.value


def stripped(expr: ast.expr) -> ast.expr:
    """Return what is reshaped, moved, indexed or wrapped by an expression."""
    while True:
        if isinstance(expr, ast.Subscript):
            expr = expr.value
        elif isinstance(expr, ast.Call) and tail(expr) in _WRAPPERS and expr.args:
            expr = expr.args[0]
        elif (
            isinstance(expr, ast.Call)
            and tail(expr) in _RESHAPING
            and isinstance(expr.func, ast.Attribute)
        ):
            expr = expr.func.value
        else:
            return expr


def origin(code: Code, expr: ast.expr) -> ast.expr:
    """Follow names and reshaping to the expression that a value comes from."""
    for _ in range(20):
        inner = stripped(expr)
        value: ast.expr | None = None
        if isinstance(inner, ast.Name):
            value = last_value(code, inner)
        if value is None:
            return inner
        expr = value
    return expr


def block_of(code: Code, statement: ast.AST) -> list[ast.stmt]:
    """Return the statements among which one stands."""
    parent = code.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block
    return []


def statement_of(code: Code, node: ast.AST) -> ast.stmt | None:
    """Return the statement that a node is a part of."""
    if isinstance(node, ast.stmt):
        return node
    return next((outer for outer in code.around(node) if isinstance(outer, ast.stmt)), None)
