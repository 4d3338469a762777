"""The guard of probes that look at torch: what happens within is out of the program's sight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from torch.compiler import is_compiling

from distdiag.probes.base import Probe
from distdiag.probes.out_of_sight import HERE, begin_hiding, end_hiding
from distdiag.record.guard import Guard

_P = TypeVar("_P", bound=Probe)
_T = TypeVar("_T")
_Args = ParamSpec("_Args")


class guard(Guard):
    """Runs a part of a probe out of sight, and hands what it raises to `fail`; for one block."""

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        self._is_outermost = begin_hiding()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._is_outermost:
            end_hiding()
        return error is not None and super().__exit__(kind, error, trace)


def guarded(
    method: Callable[Concatenate[_P, _Args], _T],
) -> Callable[Concatenate[_P, _Args], _T | None]:
    """Let a method of a probe run within the guard, while the probe is on; else return None.

    Nothing of it becomes a part of a graph that is compiled.
    """

    @functools.wraps(method)
    def call(self: _P, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _T | None:
        if is_compiling() or self.off or self.recorder.closed:
            return None
        # What is hidden already need not be hidden again.
        with guard(self.fail) if HERE.veil is None else self.guard:
            return method(self, *args, **kwargs)
        return None

    return call


def guarded_if(
    attribute: str,
) -> Callable[[Callable[Concatenate[_P, _Args], object]], Callable[Concatenate[_P, _Args], None]]:
    """Let a method run `guarded` while this attribute of its probe holds anything.

    For what is called in each step and mostly finds nothing to do: to hide it costs more.
    """

    def decorate(
        method: Callable[Concatenate[_P, _Args], object],
    ) -> Callable[Concatenate[_P, _Args], None]:
        @functools.wraps(method)
        def call(self: _P, /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
            if is_compiling() or not getattr(self, attribute):
                return
            if not (self.off or self.recorder.closed):
                with guard(self.fail) if HERE.veil is None else self.guard:
                    method(self, *args, **kwargs)

        return call

    return decorate


def guarded_in_sight(
    method: Callable[Concatenate[_P, _Args], object],
) -> Callable[Concatenate[_P, _Args], None]:
    """Let a method that looks at no tensor run within the guard of its probe, while that is on.

    Nothing is hidden: most of what `guarded` costs is that.
    """

    @functools.wraps(method)
    def call(self: _P, /, *args: _Args.args, **kwargs: _Args.kwargs) -> None:
        if is_compiling() or self.off or self.recorder.closed:
            return
        with self.guard:
            method(self, *args, **kwargs)

    return call
