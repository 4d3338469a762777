"""How a batch that the script makes itself reaches the recording of a parity run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_hooks: list[Callable[[Any], Any]] = []


def batch(value: T) -> T:
    """Return the batch to use in place of one that the script has made itself.

    In any other run than one of ``distdiag parity`` that is the batch itself. Batches of data
    loaders need no such call.
    """
    for hook in _hooks:
        value = hook(value)
    return value


def set_hook(hook: Callable[[Any], Any]) -> None:
    """Let every batch pass through a function from now on."""
    _hooks[:] = [hook]
