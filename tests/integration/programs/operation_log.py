"""Logs what the modes of a program see: operations that are dispatched, and functions of torch."""

import hashlib
from collections import Counter
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class LoggedOperations(TorchDispatchMode):
    """Keeps the names of operations, with the sizes of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [list(each.shape) if hasattr(each, "shape") else "" for each in args]
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


def summary(seen: list[str]) -> dict[str, object]:
    """Return how often each was seen, and a digest of their order."""
    digest = hashlib.sha256("\n".join(seen).encode()).hexdigest()
    return {"number": len(seen), "order": digest, "names": Counter(s.split(" ")[0] for s in seen)}
