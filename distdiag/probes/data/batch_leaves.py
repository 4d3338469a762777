"""The leaves of a batch of any shape: nested dicts, tuples, lists, dataclasses and the like."""

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch

from distdiag.probes.untyped import Untyped

_PLAIN: Final = (int, float, str, bool, type(None))
_LEAVES: Final = (torch.Tensor, *_PLAIN)


class UnknownBatchError(Exception):
    """A batch has a part that is neither a tensor nor a plain value nor a container of them."""


def leaves(batch: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path: a tensor, a plain value, or a list of plain values.

    Raises:
        UnknownBatchError: there is a part of another kind.

    """
    if isinstance(batch, _LEAVES) or _is_plain_list(batch):
        yield path, batch
    elif _is_array(batch):
        yield path, torch.from_numpy(batch)
    else:
        for name, part in _parts(batch, path):
            yield from leaves(part, f"{path}/{name}" if path else name)


def rebuild(batch: object, new: Mapping[str, Any], path: str = "") -> object:
    """Return a batch like this one with other leaves, by their paths. It may be changed itself."""
    if path in new:
        value = new[path]
        return value.numpy() if _is_array(batch) and isinstance(value, torch.Tensor) else value
    if isinstance(batch, _LEAVES) or _is_plain_list(batch) or _is_array(batch):
        return batch
    parts = {
        name: rebuild(part, new, f"{path}/{name}" if path else name)
        for name, part in _parts(batch, path)
    }
    return _like(batch, parts)


def _parts(batch: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from ((str(key), value) for key, value in batch.items())
    elif isinstance(batch, list | tuple):
        yield from ((str(index), value) for index, value in enumerate(batch))
    elif dataclasses.is_dataclass(batch):
        yield from ((each.name, getattr(batch, each.name)) for each in dataclasses.fields(batch))
    else:
        raise UnknownBatchError(
            f"{path or 'the batch'} is a {type(batch).__name__}, which is neither a tensor nor a "
            "container of tensors"
        )


def _like(batch: Untyped, parts: Mapping[str, Any]) -> Untyped:
    if isinstance(batch, MutableMapping):
        for key in list(batch):
            batch[key] = parts[str(key)]
        return batch
    if isinstance(batch, Mapping):
        return type(batch)({key: parts[str(key)] for key in batch})  # type: ignore[call-arg]
    kind: Any = type(batch)
    if hasattr(batch, "_fields"):
        return kind(*parts.values())
    if isinstance(batch, list | tuple):
        return kind(parts.values())
    return dataclasses.replace(batch, **parts)


def _is_plain_list(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(each, _PLAIN) for each in value)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
