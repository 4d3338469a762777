"""What samplers say of themselves, read from their attributes: nothing of theirs is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

from distdiag.data_event import SamplerState

_INSIDE: Final = ("batch_sampler", "sampler", "base_sampler", "_sampler", "_base_sampler")
_DEEPEST: Final = 6
_NOT_ORDER: Final = ("__init__", "set_epoch", "state_dict", "load_state_dict", "__repr__")
_NAMES: Final = {
    "epoch": ("epoch", "_epoch"),
    "seed": ("seed", "initial_seed", "_seed"),
    "num_replicas": ("num_replicas", "num_processes", "world_size"),
    "replica": ("rank", "process_index"),
    "num_skipped": ("skip_batches", "start_index", "start_iter", "consumed_samples"),
}


def chain_of(sampler: object) -> Iterator[object]:
    """Yield a sampler and those that it takes its indices from."""
    for _ in range(_DEEPEST):
        yield sampler
        inner = next((i for name in _INSIDE if (i := _own(sampler).get(name)) is not None), None)
        if inner is None:
            return
        sampler = inner


def state_of(sampler: object) -> SamplerState:
    """Return what a sampler and those inside it say of themselves."""
    chain = list(chain_of(sampler))
    found: dict[str, Any] = {field: _first_int(chain, names) for field, names in _NAMES.items()}
    found["num_skipped"] = found["num_skipped"] or 0
    shuffle = next((s for one in chain if isinstance(s := _own(one).get("shuffle"), bool)), None)
    found["uses_epoch"] = any(map(_uses_epoch, chain))
    return SamplerState(tuple(type(one).__name__ for one in chain), shuffle=shuffle, **found)


def _uses_epoch(sampler: object) -> bool:
    """Say whether what a sampler does to yield its indices reads an epoch, by its code."""
    for kind in type(sampler).__mro__:
        methods = [each for each in vars(kind).values() if inspect.isfunction(each)]
        names = {n for m in methods if m.__name__ not in _NOT_ORDER for n in m.__code__.co_names}
        if any("epoch" in name for name in names):
            return True
        own = vars(kind).get("__iter__")
        if (
            own is not None
            and "super" not in getattr(own, "__code__", _uses_epoch.__code__).co_names
        ):
            return False  # what its bases do plays no part
    return False


def _first_int(chain: list[object], names: tuple[str, ...]) -> int | None:
    for one in chain:
        for name in names:
            value = _own(one).get(name)
            if type(value) is int:
                return value
    return None


def _own(one: object) -> dict[str, Any]:
    return getattr(one, "__dict__", None) or {}
