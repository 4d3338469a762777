"""A stand-in for a class of C that nobody can derive from, so that its objects are made by us.

Functions of C are wrapped where they are (`in_place.py`), and classes of Python by their methods.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import Any

from distdiag.probes.base import AnyCallable


class StandIn:
    """Is called in place of a class, and looks like it: it is equal, though it is not the same."""

    __wrapped__: AnyCallable

    def __init__(self, original: AnyCallable) -> None:
        """Take over name, documentation, module and signature."""
        functools.update_wrapper(self, original)
        with suppress(ValueError, TypeError):  # since Python 3.12 classes are not looked behind
            self.__signature__ = inspect.signature(original)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Be of the type that the class has."""
        return type(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call what each stand-in has in its place."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Have what the class has."""
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        """Show the class."""
        return repr(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        """Equal the class."""
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        """Be found where the class is."""
        return hash(self.__wrapped__)

    def __instancecheck__(self, instance: object) -> bool:
        """Have the objects of the class."""
        return isinstance(instance, self.__wrapped__)  # type: ignore[arg-type]

    def __subclasscheck__(self, kind: type) -> bool:
        """Have no class below but the class."""
        return self == kind or issubclass(kind, self.__wrapped__)  # type: ignore[arg-type]

    def __reduce_ex__(self, _: object) -> str:
        """Be pickled by name, as a class is."""
        return self.__wrapped__.__qualname__


def stand_in(original: AnyCallable, call: AnyCallable) -> StandIn:
    """Return what is to be put in place of `original`; it calls `call`."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    kind = type("StandIn", (StandIn,), {"__call__": staticmethod(call)})
    made: StandIn = kind(original)
    return made
