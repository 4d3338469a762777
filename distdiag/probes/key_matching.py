"""Why names of a checkpoint and names of a model do not meet: another prefix, or a hole."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

Shape = tuple[int, ...]

_DEEPEST: Final = 3
_MOST_PREFIXES: Final = 8
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


class Renaming(NamedTuple):
    """Names that meet when one prefix is replaced by another one."""

    given_prefix: str
    wanted_prefix: str
    names: tuple[str, ...]
    """The names as the model has them."""


NO_RENAMING: Final = Renaming("", "", ())


def renaming(unexpected: Mapping[str, Shape], missing: Mapping[str, Shape]) -> Renaming:
    """Return the change of prefix by which most of what was given finds a place."""
    best = NO_RENAMING
    for given in _prefixes(unexpected):
        parts = [(n.removeprefix(given), s) for n, s in unexpected.items() if n.startswith(given)]
        for wanted in _prefixes(missing):
            if given != wanted and len(parts) > len(best.names):
                names = [
                    wanted + rest for rest, shape in parts if _fits(missing, wanted + rest, shape)
                ]
                if len(names) > len(best.names):
                    best = Renaming(given, wanted, tuple(names))
    return best


def holes(missing: Mapping[str, Shape], loaded: Mapping[str, Shape]) -> Iterator[str]:
    """Yield what is missing between two loaded ones that differ from it in a number only."""
    places: defaultdict[tuple[str, Shape], list[tuple[int, ...]]] = defaultdict(list)
    for name, shape in loaded.items():
        pattern, numbers = _pattern(name)
        places[pattern, shape].append(numbers)
    for name, shape in missing.items():
        pattern, numbers = _pattern(name)
        others = places.get((pattern, shape), ())
        if numbers and any(each < numbers for each in others) and any(n > numbers for n in others):
            yield name


def _prefixes(names: Iterable[str]) -> list[str]:
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")[:-1]
        counts.update(
            ".".join(parts[:depth]) + "." for depth in range(1, 1 + min(len(parts), _DEEPEST))
        )
    return ["", *(prefix for prefix, _ in counts.most_common(_MOST_PREFIXES))]


def _fits(missing: Mapping[str, Shape], name: str, shape: Shape) -> bool:
    return missing.get(name) == shape


def _pattern(name: str) -> tuple[str, tuple[int, ...]]:
    return _NUMBER.sub("#", name), tuple(int(each) for each in _NUMBER.findall(name))
