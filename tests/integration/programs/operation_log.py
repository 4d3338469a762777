"""Logs what the modes of a program see: operations that are dispatched, and functions of torch."""

import hashlib
from collections import Counter
from typing import Any

from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class LoggedOperations(TorchDispatchMode):
    """Keeps the names of operations, with the sizes of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A parameter that is not initialised yet has no shape, and raises when it is asked.
        sizes = [
            list(each.shape) if not is_lazy(each) and hasattr(each, "shape") else ""
            for each in args
        ]
        self.seen.append(f"{func} {sizes}")
        return func(*args, **(kwargs or {}))


class LoggedFunctions(TorchFunctionMode):
    """Keeps the names of functions and of attributes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        self.seen.append(f"{owner}.{getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


class Watch:
    """Both modes, around the rest of a program."""

    def __init__(self) -> None:
        self._modes: list[LoggedOperations | LoggedFunctions] = []
        self._is_ordered = True

    def begin(self, *, is_ordered: bool) -> None:
        self._is_ordered = is_ordered
        self._modes = [LoggedFunctions(), LoggedOperations()]
        for mode in self._modes:
            mode.__enter__()

    def end(self) -> dict[str, object]:
        """Return what they have seen: how often each, and in which order."""
        modes, self._modes = self._modes, []
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        return {type(mode).__name__: self._summary(mode.seen) for mode in modes}

    def _summary(self, seen: list[str]) -> dict[str, object]:
        numbers = Counter(each.split(" ")[0] for each in seen)
        reported = seen if self._is_ordered else sorted(seen)
        return {
            "digest": hashlib.sha256("\n".join(reported).encode()).hexdigest(),
            "numbers": numbers,
        }
