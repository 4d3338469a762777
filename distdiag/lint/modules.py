"""A Python file as the rules see it: functions, classes, imports, and the full names of things."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Final

from distdiag.events.errors import DamagedFileError

# Walk through syntax trees faster than `ast` does.

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


# A file, parsed, with its functions and classes.

MAX_BYTES: Final = 2_000_000
"""A file beyond this was generated, or is hostile."""

_SMALL: Final = str.maketrans(ascii_uppercase, ascii_lowercase)
_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@dataclass(frozen=True, eq=False)
class Class:
    """A class with its own methods; `bases` are full names, as far as they are known."""

    name: str
    bases: tuple[str, ...]
    methods: dict[str, Function] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Function:
    """A function, or the code of a module outside of functions (`node` is an `ast.Module`)."""

    module: Module
    name: str
    node: Scope
    owner: Class | None = None
    outer: Function | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of all parameters, in order."""
        if isinstance(self.node, ast.Module):
            return ()
        given = self.node.args
        return tuple(a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs))

    @property
    def extent(self) -> tuple[int, int]:
        """Return the first and last line, decorators included."""
        if isinstance(self.node, ast.Module):
            return 1, len(self.module.lines)
        first = min([self.node.lineno, *(d.lineno for d in self.node.decorator_list)])
        return first, self.node.end_lineno or first

    @property
    def decorators(self) -> tuple[ast.expr, ...]:
        """Return the decorators, outermost first."""
        return () if isinstance(self.node, ast.Module) else tuple(self.node.decorator_list)


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed file. `name` is its dotted name as far up as its folders are packages."""

    path: Path
    name: str
    lines: tuple[str, ...]
    tree: ast.Module

    @cached_property
    def body(self) -> Function:
        """Return the code outside of functions, as a function."""
        return Function(self, "<module>", self.tree)

    @cached_property
    def lowered(self) -> str:
        """Return the text in small letters, each line as long as in `lines`."""
        return "\n".join(self.lines).translate(_SMALL)

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        """Return the position in `lowered` at which each line starts."""
        return tuple(accumulate((len(line) + 1 for line in self.lines), initial=0))

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Return the code outside of functions, then every function and method, nested ones too."""
        return (self.body, *self._functions_below(self.body, self.tree, None))

    @cached_property
    def classes(self) -> dict[str, Class]:
        """Return the classes by name; of two with one name the later."""
        found = {f.owner.name: f.owner for f in self.functions if f.owner is not None}
        for function in self.functions:
            if function.owner is not None and function.outer is self.body:
                function.owner.methods[function.name] = function
        return found

    @cached_property
    def top_level(self) -> dict[str, Function]:
        """Return the functions of the module itself by name."""
        return {f.name: f for f in self.functions if f.outer is self.body and f.owner is None}

    @cached_property
    def imports(self) -> dict[str, str]:
        """Return the full names of what is imported anywhere in the file, by local name."""
        found: dict[str, str] = {}
        for node in statements(self.tree, nested=True):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{origin}.{alias.name}".lstrip(".")
        return found

    def full_name(self, expr: ast.expr) -> str:
        """Return the dotted name of an expression through the imports, "" for what is no name.

        Example: with ``import torch.distributed as dist``, ``dist.barrier`` is
        ``torch.distributed.barrier``. ``self.x`` stays ``self.x``.
        """
        parts: list[str] = []
        while isinstance(expr, ast.Attribute):
            parts.append(expr.attr)
            expr = expr.value
        if not isinstance(expr, ast.Name):
            return ""
        first = self.imports.get(expr.id)
        if first is None:
            is_own = expr.id in self.top_level or expr.id in self.classes
            first = f"{self.name}.{expr.id}" if is_own else expr.id
        return ".".join([first, *reversed(parts)])

    def _origin(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".")
        up = node.level - (self.path.name == "__init__.py")
        parents = package[: len(package) - up] if up else package
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _functions_below(
        self, outer: Function, node: ast.AST, owner: Class | None
    ) -> Iterator[Function]:
        for child in child_statements(node):
            if isinstance(child, _FUNCTION_NODES):
                function = Function(self, child.name, child, owner, outer)
                yield function
                yield from self._functions_below(function, child, owner)
            elif isinstance(child, ast.ClassDef):
                bases = tuple(ast.unparse(base) for base in child.bases)
                yield from self._functions_below(outer, child, Class(child.name, bases))
            else:
                yield from self._functions_below(outer, child, owner)


def parse(path: Path, text: str) -> Module:
    """Parse a file.

    Raises:
        DamagedFileError: it is not valid Python.

    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's invalid escapes are not our subject
            tree = ast.parse(text)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}:{error.offset}"
        raise DamagedFileError(f"{place}: not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedFileError(f"{path}: not valid Python: {error}") from error
    return Module(path, dotted_name(path), tuple(text.splitlines()), tree)


def dotted_name(path: Path) -> str:
    """Return the name by which a file is imported: as far up as its folders are packages."""
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.absolute().parent
    while (folder / "__init__.py").exists() and folder.name:
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts)) or path.parent.name
