"""Where the parameters of a model are: counts by module, from names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.record.regular_file import open_regular

LONGEST_HEADER: Final = 100_000_000
"""The limit that safetensors itself sets to the header of a file, in bytes."""
LENGTH_BYTES: Final = 8

Shape = tuple[int, ...]


class Count(msgspec.Struct, frozen=True):
    """A module or a tensor with its number of parameters, and their share of the model (0 to 1)."""

    name: str
    number: int
    share: float


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a model; modules and tensors are ordered from the largest."""

    total: int
    modules: tuple[Count, ...]
    tensors: tuple[Count, ...]


class _Entry(msgspec.Struct):
    shape: tuple[int, ...]


def count_parameters(shapes: Mapping[str, Shape], *, depth: int = 2) -> Parameters:
    """Count the parameters of a model by its tensors' names and shapes.

    A module is what the first `depth` parts of a name say: ``layers.3`` of ``layers.3.mlp.weight``
    for 2.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    modules: dict[str, int] = {}
    for name, size in sizes.items():
        parents = name.split(".")[:-1] or [name]
        module = ".".join(parents[:depth])
        modules[module] = modules.get(module, 0) + size
    return Parameters(total=total, modules=_counts(modules, total), tensors=_counts(sizes, total))


def _counts(sizes: Mapping[str, int], total: int) -> tuple[Count, ...]:
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Count(name, size, size / total if total else 0.0) for name, size in ordered)


def shapes_in_safetensors(paths: Iterable[Path]) -> dict[str, Shape]:
    """Read the names and shapes of tensors from the headers of safetensors files; no weights.

    Format: eight bytes, little-endian, with the length of a JSON object that follows; each of its
    keys but ``__metadata__`` is a tensor (https://huggingface.co/docs/safetensors).

    Raises:
        UsageError: a file cannot be read.
        DamagedFileError: a file is no safetensors file.

    """
    shapes: dict[str, Shape] = {}
    for path in paths:
        shapes.update(_header(path))
    return shapes


def _header(path: Path) -> dict[str, Shape]:
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > LONGEST_HEADER:
                raise DamagedFileError(f"{path}: not a safetensors file: its header is too long")
            text = file.read(length)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return {
            name: msgspec.json.decode(raw, type=_Entry).shape
            for name, raw in entries.items()
            if name != "__metadata__"
        }
    except UNDECODABLE as error:
        raise DamagedFileError(f"{path}: not a safetensors file: {error}") from None
