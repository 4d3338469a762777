"""The given files together: which function a call leads to."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from distdiag.events.errors import DamagedFileError
from distdiag.lint.bindings import value_of
from distdiag.lint.modules import Class, Function, Module, dotted_name, parse
from distdiag.lint.sources import STDIN, read_text

_MAX_HOPS: Final = 8
"""So many imports of imports, or classes above a class, are followed."""


class Project:
    """The files that were given, each parsed once, when something leads to it."""

    def __init__(self, paths: Sequence[Path], stdin: str = "") -> None:
        """Have parsed none; `stdin` is the text that the path ``-`` stands for."""
        self._stdin = stdin
        self._paths = {path.absolute() for path in paths}
        self._by_name = {dotted_name(path): path for path in reversed(paths)}
        self._modules: dict[Path, Module] = {}
        self._found: dict[tuple[str, str], Module | None] = {}
        self._targets: dict[ast.Call, Function | None] = {}

    def text(self, path: Path) -> str:
        """Return the text of a file.

        Raises:
            DamagedFileError: it cannot be read.

        """
        return self._stdin if path == STDIN else read_text(path)

    def module(self, path: Path) -> Module:
        """Return the module of a file.

        Raises:
            DamagedFileError: it cannot be read or is not Python.

        """
        key = path.absolute()
        if key not in self._modules:
            self._modules[key] = parse(path, self.text(path))
        return self._modules[key]

    def target(self, call: ast.Call, function: Function) -> Function | None:
        """Return the function of the given files that a call runs, None where that is not known."""
        if call not in self._targets:
            self._targets[call] = self._target(call.func, function)
        return self._targets[call]

    def _target(self, func: ast.expr, function: Function) -> Function | None:
        module = function.module
        if isinstance(func, ast.Attribute):
            owner = func.value.func if isinstance(func.value, ast.Call) else func.value
            name = owner.id if isinstance(owner, ast.Name) else ""
            is_super = name == "super" and owner is not func.value
            if is_super or (name in ("self", "cls") and owner is func.value):
                return self._method_of_own_class(function, func.attr, is_super=is_super)
            made = value_of(func.value, function)
            if isinstance(made, ast.Call):
                found = self._class(module.full_name(made.func), module)
                return self._method(*found, func.attr) if found else None
        if isinstance(func, ast.Name):
            nested = [f for f in module.functions if f.name == func.id and f.outer is function]
            if nested:
                return nested[-1]
        return self._named(module.full_name(func), module)

    def _method_of_own_class(
        self, function: Function, name: str, *, is_super: bool
    ) -> Function | None:
        owner, module = function.owner, function.module
        if owner is None:
            return None
        if not is_super:
            return self._method(owner, module, name)
        above = (self._base(base, module) for base in owner.bases)
        found = (self._method(*base, name) for base in above if base is not None)
        return next((method for method in found if method is not None), None)

    def _named(self, full: str, near: Module) -> Function | None:
        if not full:
            return None
        found = self._class(full, near)
        if found is not None:
            return self._method(*found, "__init__")
        home, _, name = full.rpartition(".")
        owner = self._class(home, near) if home else None
        if owner is not None:
            return self._method(*owner, name)
        place = self._definition(full, near)
        return place[0].top_level.get(place[1]) if place is not None else None

    def _class(self, full: str, near: Module) -> tuple[Class, Module] | None:
        place = self._definition(full, near)
        if place is None or place[1] not in place[0].classes:
            return None
        return place[0].classes[place[1]], place[0]

    def _definition(self, full: str, near: Module) -> tuple[Module, str] | None:
        """Return the module that defines a full name, and the name there."""
        for _ in range(_MAX_HOPS):
            home, _, name = full.rpartition(".")
            module = near if home == near.name else self._find(home, near)
            if module is None:
                return None
            if name in module.top_level or name in module.classes:
                return module, name
            if name not in module.imports:
                return None
            full, near = module.imports[name], module
        return None

    def _find(self, name: str, near: Module) -> Module | None:
        key = (name, str(near.path.parent))
        if key not in self._found:
            beside = near.path.absolute().parent / f"{name.replace('.', '/')}.py"
            path = beside if name and beside in self._paths else self._by_name.get(name)
            try:
                self._found[key] = self.module(path) if path is not None else None
            except DamagedFileError:  # reported when its turn comes
                self._found[key] = None
        return self._found[key]

    def _method(self, owner: Class, module: Module, name: str) -> Function | None:
        classes = [(owner, module)]
        for owner, module in classes:  # grows while it is walked through
            if name in owner.methods:
                return owner.methods[name]
            bases = (self._base(base, module) for base in owner.bases)
            classes += [base for base in bases if base is not None and base not in classes]
            if len(classes) > _MAX_HOPS:
                return None
        return None

    def _base(self, base: str, module: Module) -> tuple[Class, Module] | None:
        try:
            return self._class(module.full_name(ast.parse(base, mode="eval").body), module)
        except SyntaxError:
            return None
