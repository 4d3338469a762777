"""What the user's modules were given in whose forward passes a call happens."""

import inspect
import os
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from distdiag.probes.untyped import Untyped

TORCH: Final = os.path.dirname(torch.__file__) + os.sep
"""Where torch's own files are."""

_MOST_FRAMES: Final = 200
_VARIADIC: Final = (0x04, 0x08)
"""Flags of code that takes further positional arguments, and further named ones."""
_ASKING: Final = {"locals", "vars", "eval", "exec"}


class Arguments(NamedTuple):
    """The code of a module's forward pass, what it was given, and functions it may call."""

    code: CodeType
    further: tuple[Any, ...]
    named: dict[str, Any]
    called: tuple[CodeType, ...] = ()


def arguments_of(frame: FrameType | None) -> Iterator[Arguments]:
    """Yield the arguments of the modules that run, the innermost first.

    A frame keeps what was read of its variables until it ends. A function that may ask for them
    itself is left alone, since it would see that, and others are rid of it at once.
    """
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        is_module = code.co_name == "forward" and code.co_argcount > 0
        if is_module and not code.co_filename.startswith(TORCH) and not _ASKING & {*code.co_names}:
            found = _read(frame)
            if found is not None:
                yield found
        frame = frame.f_back


def running_module(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module that runs, be it one of torch's own."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount > 0 and not _ASKING & {*code.co_names}:
            variables = frame.f_locals
            found = variables.get(code.co_varnames[0])
            if type(variables) is dict:  # before Python 3.13 it is a copy
                variables.clear()
            if isinstance(found, nn.Module):
                return found
        frame = frame.f_back
    return None


def _read(frame: FrameType) -> Arguments | None:
    code, variables = frame.f_code, frame.f_locals
    names = _names_of(code)
    given = {name: variables[name] for name in names if name in variables}
    if type(variables) is dict:  # before Python 3.13 it is a copy
        variables.clear()
    module = given.pop(names[0], None)
    if not isinstance(module, nn.Module):
        return None
    further, named = (_variadic(code, given, flag) for flag in _VARIADIC)
    called = tuple(_called(code, frame.f_globals, module))
    return Arguments(code, tuple(further or ()), given | dict(named or {}), called)


def _called(code: CodeType, namespace: dict[str, Any], module: nn.Module) -> Iterator[CodeType]:
    """Yield functions and methods that a forward pass names, and those of its submodules."""
    # Comprehensions have a code of their own.
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    for name in dict.fromkeys(name for each in (code, *nested) for name in each.co_names):
        # Without asking the class: what it has may be computed by code of the program.
        found = namespace.get(name, inspect.getattr_static(type(module), name, None))
        found = found.__func__ if isinstance(found, staticmethod) else found
        if isinstance(found, FunctionType):
            yield found.__code__
    for child in module.children():
        forward = type(child).forward
        if isinstance(forward, FunctionType) and not forward.__code__.co_filename.startswith(TORCH):
            yield forward.__code__


def _names_of(code: CodeType) -> tuple[str, ...]:
    number = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[: number + sum(bool(code.co_flags & flag) for flag in _VARIADIC)]


def _variadic(code: CodeType, given: dict[str, Any], flag: int) -> Untyped:
    """Take what further arguments of a kind there are."""
    if not code.co_flags & flag:
        return None
    is_second = flag == _VARIADIC[1] and bool(code.co_flags & _VARIADIC[0])
    index = code.co_argcount + code.co_kwonlyargcount + is_second
    return given.pop(code.co_varnames[index], None)
