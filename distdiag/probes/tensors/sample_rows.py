"""Digests of the samples of a batch, so that the same sample is known wherever it turns up."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import xxhash

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import is_readable

_DEEPEST: Final = 4
_MOST_TENSORS: Final = 8
_MOST_BYTES: Final = 1 << 26


def tensors_in(value: object, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch or of arguments, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0:
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    for part in parts:
        yield from tensors_in(part, depth - 1)


def first_tensors(value: object) -> list[torch.Tensor]:
    """Return some tensors of a batch or of arguments that have more than one number."""
    found: list[torch.Tensor] = []
    for tensor in tensors_in(value):
        if tensor.ndim > 0 and len(found) < _MOST_TENSORS:
            found.append(tensor)
    return found


def named_tensors(
    value: object, name: str = "", depth: int = _DEEPEST
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with the keys and places under which it holds them."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0:
        return
    parts: Iterable[tuple[object, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        yield from named_tensors(part, f"{name}.{key}" if name else str(key), depth - 1)


def fields_of(
    batch: object, num_rows: int, places: Iterable[int]
) -> tuple[tuple[tuple[str, bool], ...], tuple[tuple[str, ...], ...]]:
    """Return the parts of each sample, and their digests in these rows of a batch on the CPU.

    A part is a name, and whether it holds whole numbers.
    """
    with out_of_sight():
        parts = [
            (name, tensor)
            for name, tensor in named_tensors(batch)
            if tensor.ndim > 0
            and tensor.shape[0] == num_rows
            and tensor.device.type == "cpu"
            and is_readable(tensor)
        ][:_MOST_TENSORS]
        names = tuple((n, not (t.is_floating_point() or t.is_complex())) for n, t in parts)
        rows = tuple(tuple(_digest(t[place]) for _, t in parts) for place in places)
        return names, rows


def _digest(row: torch.Tensor) -> str:
    flat = row.detach().contiguous().reshape(-1)
    content = flat.view(torch.uint8) if flat.numel() else flat
    return xxhash.xxh3_64_hexdigest(content.numpy().tobytes())


def rows_of(batch: object, num_rows: int) -> tuple[str, ...]:
    """Return a digest for each sample of a batch on the CPU; nothing if that cannot be had."""
    with out_of_sight():
        tensors = [
            tensor
            for tensor in first_tensors(batch)
            if tensor.shape[0] == num_rows and tensor.device.type == "cpu" and is_readable(tensor)
        ]
        if not tensors or sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
            return ()
        states = [xxhash.xxh3_64() for _ in range(num_rows)]
        for tensor in tensors:
            flat = tensor.detach().contiguous().reshape(num_rows, -1)
            rows = flat.view(torch.uint8) if flat.numel() else flat
            for state, row in zip(states, rows, strict=True):
                state.update(row.numpy().tobytes())
        return tuple(state.hexdigest() for state in states)
