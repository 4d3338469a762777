"""The numbers that the modules and settings of a program hold as coefficients, by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final

from torch import nn

from distdiag.coefficient_names import is_coefficient
from distdiag.user_code import is_user_file

_MOST_MODULES: Final = 512
_MOST_NAMES: Final = 256
_SETTINGS: Final = ("config", "cfg", "args")


def named_coefficients(
    frame: FrameType | None, main_script: str | None, models: Iterable[nn.Module]
) -> frozenset[float]:
    """Return what modules, their settings, arguments and globals of the stack name coefficients."""
    found = set(_of_arguments())
    known: set[int] = set()
    while frame is not None:
        namespace = frame.f_globals
        if id(namespace) not in known and is_user_file(frame.f_code.co_filename, main_script):
            known.add(id(namespace))
            found.update(_of_names(namespace))
            for value in list(namespace.values()):
                found.update(_of_settings(value))
        frame = frame.f_back
    for root in models:
        for module in islice(root.modules(), _MOST_MODULES):
            found.update(_of_names(vars(module)))
            for name in _SETTINGS:
                found.update(_of_settings(vars(module).get(name)))
    return frozenset(found)


def _of_arguments() -> Iterator[float]:
    for before, argument in zip(sys.argv, sys.argv[1:], strict=False):
        name, _, value = argument.rpartition("=")
        if is_coefficient(name or before):
            try:
                yield float(value)
            except ValueError:
                continue


def _of_settings(value: Any) -> Iterator[float]:  # noqa: ANN401
    # By types and not by attributes: a proxy would answer for what it stands for, or raise.
    kind = type(value)
    if issubclass(kind, dict):
        yield from _of_names(value)
    elif not issubclass(kind, (ModuleType, FunctionType, nn.Module)):
        with suppress(AttributeError):
            yield from _of_names(object.__getattribute__(value, "__dict__"))


def _of_names(values: Any) -> Iterator[float]:  # noqa: ANN401
    for name, value in list(values.items())[:_MOST_NAMES]:
        if type(value) is float and value and type(name) is str and is_coefficient(name):
            yield value
