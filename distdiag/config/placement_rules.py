"""The rules of a sharding plan: what tensors have these names, and how each axis splits them.

A placement is written ``Shard(0) over ep`` or ``Replicate over *``, several with commas between.
Axes that a rule does not name are free, unless it has one for ``*``: all other axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

import msgspec

# Patterns over the names of modules and parameters, as sharding plans write them.

_LIKENESS: Final = 0.7
_FEWEST_PARTS: Final = 2


def matches(pattern: str, name: str) -> bool:
    """Say whether a name fits; `*` stands for anything, dots too."""
    return fnmatchcase(name, pattern)


def generic(name: str) -> str:
    """Return a name with `*` in the place of the numbers of layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def closest(pattern: str, names: Iterable[str]) -> str:
    """Return the name, numbers aside, that a pattern without a match most likely means.

    First those that it would fit with another prefix, or as the name of a module, then those that
    are spelt alike; an empty string if there is none.
    """
    generics = list(dict.fromkeys(map(generic, names)))
    wanted = generic(pattern)
    parts = wanted.split(".")
    for start in range(max(1, len(parts) - _FEWEST_PARTS + 1)):
        end = ".".join(parts[start:])
        if not re.search(r"\w", end):
            break
        for name in generics:
            if any(matches(each, f".{name}") for each in (f"*.{end}", f"*.{end}.*")):
                return name
    return next(iter(get_close_matches(wanted, generics, 1, _LIKENESS)), "")


# The rules themselves, and how they are read from the configuration.

ALL_AXES: Final = "*"

_FORM: Final = '"Shard(0) over ep" or "Replicate over *", several with commas between'
_PART: Final = re.compile(
    r"(?:Shard\((-?\d{1,2})\)|Replicate(?:\(\))?)\s+over\s+(\*|[A-Za-z_][\w-]*)"
)


class AxisPlacement(msgspec.Struct, frozen=True, array_like=True):
    """What a mesh axis does to a tensor: it splits dimension `dim`, or (None) replicates it."""

    axis: str
    dim: int | None = None

    def __str__(self) -> str:
        what = "Replicate" if self.dim is None else f"Shard({self.dim})"
        return f"{what} over {self.axis}"

    def symbol(self, num_dims: int) -> str:
        """Return the placement as a plan of a tensor has it: ``S(0)`` or ``R``."""
        if self.dim is None:
            return "R"
        return f"S({self.dim + num_dims if self.dim < 0 else self.dim})"


class PlacementRule(msgspec.Struct, frozen=True, array_like=True):
    """How all tensors whose names fit `pattern` should be placed."""

    pattern: str
    placements: tuple[AxisPlacement, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.placements))

    def wanted(self, axis: str, num_dims: int) -> str | None:
        """Return the placement that is wanted over an axis, None if it is free."""
        by_axis = {placed.axis: placed for placed in self.placements}
        placed = by_axis.get(axis, by_axis.get(ALL_AXES))
        return placed.symbol(num_dims) if placed is not None else None

    def clashing_axis(self, other: PlacementRule, num_dims: int) -> str | None:
        """Return the first axis over which the rules want different placements."""
        for placed in (*self.placements, *other.placements):
            mine, theirs = self.wanted(placed.axis, num_dims), other.wanted(placed.axis, num_dims)
            if mine is not None and theirs is not None and mine != theirs:
                return placed.axis
        return None


def rules_of(table: object) -> tuple[PlacementRule, ...]:
    """Return the rules of a ``[plan]`` table, in its order.

    Raises:
        ValueError: an entry is no rule; the message names its key.

    """
    if not isinstance(table, Mapping):
        raise ValueError('key "plan": expected a table of patterns and placements')
    return tuple(_rule(pattern, text) for pattern, text in table.items())


def _rule(pattern: str, text: object) -> PlacementRule:
    key = f'key "plan.{pattern}"'.encode("unicode_escape").decode()
    if isinstance(text, Mapping):
        raise ValueError(f"{key}: expected text; write a pattern that has dots in quotes")
    if not isinstance(text, str):
        raise ValueError(f"{key}: expected {_FORM}, got {text!r}")
    if not pattern.strip():
        raise ValueError(f"{key}: the pattern is empty")
    try:
        return PlacementRule(pattern, tuple(_placements(text)))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _placements(text: str) -> Iterator[AxisPlacement]:
    axes: set[str] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"expected {_FORM}, got {text!r}")
        dim, axis = found.groups()
        if axis == ALL_AXES and dim is not None:
            raise ValueError(f"Shard needs the name of one axis, got {part.strip()!r}")
        if axis in axes:
            raise ValueError(f"the axis {axis} is given twice in {text!r}")
        axes.add(axis)
        yield AxisPlacement(axis, None if dim is None else int(dim))
