"""Stand-ins for functions of C that a script can neither tell from them nor is bound to use.

An audit hook would see the same calls, but it cannot be removed, and with one in place the
interpreter reports far more than files: every `id()`, every look at the code of a frame. That made
the stack of a collective four times as dear.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from distdiag.probes.base import AnyCallable

_SETS: Final[tuple[set[Callable[..., Any]], ...]] = (
    os.supports_dir_fd,
    os.supports_effective_ids,
    os.supports_fd,
    os.supports_follow_symlinks,
)


class StandIn:
    """Is called in place of a built-in function, and looks like it.

    No Python function: as an attribute of a class, that would become a method.
    """

    __wrapped__: AnyCallable

    def __init__(self, original: AnyCallable) -> None:
        """Take over name, documentation and module."""
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call what each kind of stand-in has in its place."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Have what the function has."""
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        """Show the function."""
        return repr(self.__wrapped__)

    def __instancecheck__(self, instance: object) -> bool:
        """Stand in for a class, too."""
        return isinstance(instance, self.__wrapped__)  # type: ignore[arg-type]

    def __reduce__(self) -> str:
        """Be pickled by name, as a function is."""
        return self.__wrapped__.__name__


def stand_in(original: AnyCallable, call: AnyCallable) -> StandIn:
    """Return what is to be put in place of `original`; `call` gets it before the arguments."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    kind = type("StandIn", (StandIn,), {"__call__": call})
    made: StandIn = kind(original)
    return made


class Replacements:
    """Functions replaced in every module that has them, under whatever name."""

    def __init__(self) -> None:
        """Nothing is replaced yet."""
        self._done: dict[int, tuple[AnyCallable, AnyCallable]] = {}

    def replace(self, original: AnyCallable, value: AnyCallable) -> None:
        """Replace one function."""
        self.replace_all({original.__name__: (original, value)})

    def replace_all(self, pairs: Mapping[str, tuple[AnyCallable, AnyCallable]]) -> None:
        """Replace functions (values: original and stand-in), in one walk over all modules."""
        by_id = {id(original): (original, value) for original, value in pairs.values()}
        self._done |= by_id
        _swap({number: value for number, (_, value) in by_id.items()})
        for original, value in by_id.values():
            for functions in _SETS:
                if original in functions:
                    functions.add(value)

    def undo(self) -> None:
        """Put the functions back wherever their stand-ins are."""
        _swap({id(value): original for original, value in self._done.values()})
        for _, value in self._done.values():
            for functions in _SETS:
                functions.discard(value)
        self._done = {}


def _swap(by_id: dict[int, AnyCallable]) -> None:
    for module_name, module in list(sys.modules.items()):
        # vars(): getattr would wake modules that load themselves lazily.
        names = getattr(module, "__dict__", None)
        # What we use for ourselves stays what it is.
        if module_name.partition(".")[0] == "distdiag" or not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            found = by_id.get(id(value))
            if found is not None:
                names[name] = found
