"""Functions of a program that split or gather sequences, as its author has marked them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar

# How a batch that the script makes itself reaches the recording of a parity run.

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


# The marks of this process.

F = TypeVar("F", bound=Callable[..., Any])

Role = Literal["split", "gather"]


class Mark(NamedTuple):
    """A marked function. Split and gather of the same `name` belong together."""

    role: Role
    function: Callable[..., Any]
    dim: int
    name: str


MARKED: Final[dict[tuple[Role, str], Mark]] = {}
"""What decorators of this process have marked: they run before there is anything to hand it to."""


def splits_sequence(dim: int = 1, *, name: str = "") -> Callable[[F], F]:
    """Mark a function that returns this rank's part of a sequence along `dim`.

    It is called with the whole tensor when ``--verify-sequence`` is on, and is left as it is. Name
    it, and its counterpart alike, if there are several.
    """
    return _marking("split", dim, name)


def gathers_sequence(dim: int = 1, *, name: str = "") -> Callable[[F], F]:
    """Mark a function that makes the whole sequence along `dim` from the parts of all ranks."""
    return _marking("gather", dim, name)


def _marking(role: Role, dim: int, name: str) -> Callable[[F], F]:
    def mark(function: F) -> F:
        MARKED[role, name] = Mark(role, function, dim, name)
        return function

    return mark
