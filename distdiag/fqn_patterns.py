"""Patterns over the names of modules and parameters, as sharding plans write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

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
