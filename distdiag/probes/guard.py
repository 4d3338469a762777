"""The guard of probes that look at torch: what happens within is out of the program's sight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import torch

from distdiag.probes.base import Probe
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.record.guard import Guard

_P = TypeVar("_P", bound=Probe)
_T = TypeVar("_T")
_Args = ParamSpec("_Args")


class guard(Guard):
    """Runs a part of a probe out of sight, and hands what it raises to `fail`; for one block."""

    __slots__ = ("_hidden",)

    def __init__(self, fail: Callable[[Exception], object]) -> None:
        """Tell `fail`, which is that of the probe."""
        super().__init__(fail)
        self._hidden = out_of_sight()

    def __enter__(self) -> None:
        self._hidden.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._hidden.__exit__(kind, error, trace)
        return super().__exit__(kind, error, trace)


def guarded(
    method: Callable[Concatenate[_P, _Args], _T],
) -> Callable[Concatenate[_P, _Args], _T | None]:
    """Let a method of a probe run within the guard, while the probe is on; else return None.

    Nothing of it becomes a part of a graph that is compiled.
    """

    @functools.wraps(method)
    def call(self: _P, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _T | None:
        if torch.compiler.is_compiling() or self.is_off:
            return None
        with guard(self.fail):
            return method(self, *args, **kwargs)
        return None

    return call
