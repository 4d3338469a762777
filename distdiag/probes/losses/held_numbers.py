"""The numbers that a program holds: constants of its code, settings, attributes of its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final

from torch import nn

from distdiag.record.user_code import is_user_file

MOST_NUMBERS: Final = 4096
MOST_MULTIPLES: Final = 64

_MOST_CODES: Final = 512
_MOST_MODULES: Final = 512
_CLOSE: Final = 1e-6


def held_numbers(
    frame: FrameType | None, main_script: str | None, models: Iterable[nn.Module]
) -> frozenset[float]:
    """Return the numbers of the user's code that runs, and of modules and their settings."""
    found: set[float] = set(_of_arguments())
    known: set[int] = set()
    while frame is not None:
        if is_user_file(frame.f_code.co_filename, main_script):
            found.update(_of_code(frame.f_code))
            if id(frame.f_globals) not in known:
                known.add(id(frame.f_globals))
                for value in list(frame.f_globals.values()):
                    found.update(_of_value(value, frame.f_globals))
        frame = frame.f_back
    for root in models:
        for number, module in enumerate(root.modules()):
            if number >= _MOST_MODULES or len(found) > MOST_NUMBERS:
                break
            found.update(_of_settings(module))
            found.update(_of_settings(getattr(module, "config", None)))
    return frozenset(found)


def multiples_of(value: float, held: Iterable[float]) -> tuple[int, ...]:
    """Return by which whole numbers a value would have to be multiplied to be one that is held."""
    numbers = list(held)
    return tuple(
        times
        for times in range(1, MOST_MULTIPLES + 1)
        if any(abs(number - value * times) <= _CLOSE * abs(number) for number in numbers)
    )


def _of_arguments() -> Iterator[float]:
    for argument in sys.argv[1:]:
        try:
            yield float(argument.rpartition("=")[2])
        except ValueError:
            continue


def _of_code(code: CodeType) -> Iterator[float]:
    waiting, count = [code], 0
    while waiting and count < _MOST_CODES:
        count += 1
        for constant in waiting.pop().co_consts:
            if isinstance(constant, CodeType):
                waiting.append(constant)
            elif isinstance(constant, float) and constant:
                yield constant
            elif isinstance(constant, tuple):
                yield from (each for each in constant if isinstance(each, float) and each)


def _of_value(value: object, namespace: dict[str, Any]) -> Iterator[float]:
    if isinstance(value, FunctionType):
        if value.__globals__ is namespace:
            yield from _of_code(value.__code__)
    elif isinstance(value, type):
        for part in list(vars(value).values()):
            if isinstance(part, FunctionType):
                yield from _of_code(part.__code__)
    else:
        yield from _of_settings(value)


def _of_settings(value: object) -> Iterator[float]:
    if isinstance(value, float) and value:
        yield value
    elif isinstance(value, dict):
        yield from _floats(value)
    elif not isinstance(value, (type, ModuleType)):
        yield from _floats(getattr(value, "__dict__", {}))


def _floats(values: dict[Any, Any]) -> Iterator[float]:
    for value in list(values.values())[:MOST_MULTIPLES]:
        if isinstance(value, float) and value:
            yield value
