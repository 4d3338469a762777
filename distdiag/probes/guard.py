"""The guard through which the program enters every part of a probe that looks at torch.

It keeps what happens within out of the program's sight, and an exception away from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import torch

from distdiag.probes.base import Probe
from distdiag.probes.out_of_sight import out_of_sight

_P = TypeVar("_P", bound=Probe)
_Args = ParamSpec("_Args")


class guard:
    """Runs a part of a probe out of sight, and hands what it raises to `fail`."""

    __slots__ = ("_fail", "_hidden")

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        """Tell `fail`, which is that of the probe."""
        self._fail = fail
        self._hidden = out_of_sight()

    def __enter__(self) -> None:
        """Begin our part."""
        self._hidden.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Go back to the program's part; only what is no `Exception` gets out."""
        self._hidden.__exit__(kind, error, trace)
        if not isinstance(error, Exception):
            return False
        self._fail(error)
        return True


def guarded(
    method: Callable[Concatenate[_P, _Args], None],
) -> Callable[Concatenate[_P, _Args], None]:
    """Let a method of a probe run within the guard, while the probe is on.

    Nothing of it becomes a part of a graph that is compiled.
    """

    @functools.wraps(method)
    def call(self: _P, /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        if torch.compiler.is_compiling() or self.is_off:
            return
        with guard(self.fail):
            method(self, *args, **kwargs)

    return call
