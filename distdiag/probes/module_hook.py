"""A hook of a module that no copy of the module and no file keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """Calls `tell` with what a hook is given, never while a graph is compiled.

    A copy of the module, also one in a file, gets a hook that does nothing and is Python's own.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        """Tell this; it raises nothing."""
        self._tell = tell

    def __call__(self, *args: Any) -> None:  # noqa: ANN401
        """Tell of a forward pass."""
        if not torch.compiler.is_compiling():
            self._tell(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., Any]:
        """Let a copy do nothing."""
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        """Let what is read from a file do nothing."""
        return (getattr, (contextlib.nullcontext(), "__exit__"))
