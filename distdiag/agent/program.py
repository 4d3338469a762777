"""The program that a checked run runs as ``__main__``, found and started as Python does it."""

import builtins
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType
from typing import Any, Final, NamedTuple

from distdiag.events.errors import UsageError

_LINE: Final = 4096
"""Longer is no first line of a script: Linux reads 256 bytes of it."""


class Program(NamedTuple):
    """What to run as ``__main__``. `attributes` are those of the module beside the usual ones.

    `holds_modules`: `first_on_path` is what was named, a folder or a zip file with a __main__.py.
    """

    code: Callable[[], CodeType]
    attributes: dict[str, Any]
    argv: list[str]
    path: str
    first_on_path: str
    holds_modules: bool = False


def find_script(script: str, args: Sequence[str]) -> Program:
    """Return what ``python script args`` runs: a file, or a folder or zip file with a __main__.py.

    Raises:
        UsageError: Python would not run it, or every rank would read it from one stream.

    """
    if script == "-":
        raise UsageError("the script cannot be read from stdin (-): write it to a file")
    # Not normalised: Python opens the path as it is given, and link/.. is not always the folder.
    path = script if os.path.isabs(script) else os.path.join(os.getcwd(), script)
    if not os.path.exists(path):
        raise UsageError(f"script {script!r} does not exist")
    importer = get_importer(path)
    if importer is not None:
        return _find_main_module(script, path, importer.find_spec("__main__"), args)
    if not os.path.isfile(path):
        raise UsageError(f"script {script!r} is not a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {script!r} cannot be read")
    is_compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
    return Program(
        # Compiled when the script begins, so that a syntax error is the script's own.
        code=lambda: (
            loader.get_code("__main__") or compile("", path, "exec")
            if is_compiled
            else compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        ),
        attributes={"__file__": path, "__loader__": loader, "__spec__": None, "__package__": None},
        argv=[script, *args],
        path=path,
        # As Python does: the folder of the file itself, if the script is a link to it.
        first_on_path=os.path.dirname(os.path.realpath(path)),
    )


def _find_main_module(
    script: str, path: str, spec: ModuleSpec | None, args: Sequence[str]
) -> Program:
    if spec is None:
        kind = "folder" if os.path.isdir(path) else "zip file"
        raise UsageError(f"script {script!r} is a {kind} without a __main__.py")
    program = _module_program(spec, "__main__", [script, *args], first_on_path=path)
    return program._replace(holds_modules=True)


def is_command(words: Sequence[str], script: str, args: Sequence[str]) -> bool:
    """Whether what follows the options on a command line names a command: it stands after ``--``.

    `words` are all of the line. A path that ends in .py is a script all the same.
    """
    before = len(words) - len(args) - 2
    is_marked = before >= 0 and words[before] == "--"
    return is_marked and not script.endswith(".py") and shutil.which(script) is not None


def find_command(name: str, args: Sequence[str]) -> Program | None:
    """Return the program that a console script of this Python is; None if it is anything else."""
    path = shutil.which(name) or name
    try:
        with Path(path).open("rb") as file:
            first, second = file.readline(_LINE), file.readline(_LINE)
    except OSError:
        return None
    # Where the path of Python is too long for the first line, pip lets a shell start it.
    line = second if first.startswith(b"#!/bin/sh") and b"exec'" in second else first
    named = line.replace(b"'''exec'", b"#!").split(b'"$0"')[0].removeprefix(b"#!")
    python = Path(os.fsdecode(named).strip().strip('"'))
    if not first.startswith(b"#!") or not python.name.startswith("python"):
        return None
    own = Path(sys.executable).parent.resolve()
    return find_script(path, args) if python.parent.resolve() == own else None


def find_module(name: str, args: Sequence[str]) -> Program:
    """Return what ``python -m name args`` runs.

    Raises:
        UsageError: there is no such module, or it cannot be run.

    """
    cwd = os.getcwd()
    if not sys.flags.safe_path:
        sys.path[0] = cwd
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(f"module {name!r} cannot be found: {error}") from None
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        raise UsageError(f"module {name!r} does not exist or cannot be run")
    return _module_program(spec, spec.name, [spec.origin, *args], first_on_path=cwd)


def _module_program(spec: ModuleSpec, name: str, argv: list[str], *, first_on_path: str) -> Program:
    path, loader = spec.origin or "", spec.loader
    return Program(
        code=lambda: loader.get_code(name) or compile("", path, "exec"),  # type: ignore[union-attr]
        attributes={
            "__file__": path,
            "__loader__": loader,
            "__spec__": spec,
            "__package__": spec.parent,
            "__cached__": spec.cached,
        },
        argv=argv,
        path=path,
        first_on_path=first_on_path,
    )


def run_as_main(program: Program) -> None:
    """Run the program in a fresh ``__main__``, as the interpreter would."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __cached__=None, __annotations__={})
    module.__dict__.update(program.attributes)
    sys.modules["__main__"] = module
    sys.argv = program.argv
    if not sys.flags.safe_path:
        sys.path[0] = program.first_on_path
    elif program.holds_modules:
        sys.path.insert(0, program.first_on_path)  # Python does, even if asked for a safe path
    exec(program.code(), module.__dict__)
