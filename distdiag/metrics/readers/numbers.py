"""Numbers as logs print them: NaN and infinities, thousands, units, fractions of a total."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# Possessive quantifiers keep the search linear, and `12:34` from being read as 12.
NUMBER: Final = (
    r"[-+]?+(?:\d{1,3}+(?:,\d{3})++(?![\d,])(?:\.\d++)?+|\d++(?:\.\d*+)?+(?:[eE][-+]?+\d++)?+"
    r"|\.\d++(?:[eE][-+]?+\d++)?+|(?i:nan|infinity|inf)(?![A-Za-z]))"
)
"""A number: ``1e-05``, ``1,234``, ``.5``, ``-inf``. A comma of decimals is not guessed."""

UNIT: Final = (
    r" ?(?:[KMGTP]i?B|[kmGT]b|TFLOPS|TFLOP/s|%|ms|us|µs|ns|it/s|s/it|s|min|[KMGBT])(?![A-Za-z/])"
)
"""What may stand behind a number and belongs to it."""

_VALUE: Final = re.compile(rf"({NUMBER})({UNIT})?+(?:/\d++)?+")
_WRAPPED: Final = re.compile(
    r"(?:np\.\w{1,16}|numpy\.\w{1,16}|tensor)\(([^(),]{1,40})[^()]{0,80}\)"
)
# Counts are multiplied, times become seconds; memory and shares stay as they are printed.
_SCALES: Final = {
    "K": 1e3,
    "M": 1e6,
    "B": 1e9,
    "G": 1e9,
    "T": 1e12,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
}
# Memory is told in GiB, whatever the line prints, so that a series keeps one unit.
_MEMORY: Final = {
    "KiB": 2.0**-20,
    "MiB": 2.0**-10,
    "GiB": 1.0,
    "TiB": 2.0**10,
    "PiB": 2.0**20,
    "KB": 2.0**-20,
    "MB": 2.0**-10,
    "GB": 1.0,
    "TB": 2.0**10,
    "PB": 2.0**20,
}


def scaled(number: str, unit: str | None) -> float:
    """Return a number that `NUMBER` matched, with its unit.

    Counts (``1.2K``) are multiplied, times become seconds, memory becomes GiB (torch prints GB for
    2**30 bytes), and per cent stay what they are.
    """
    value = float(number.replace(",", ""))
    if not unit:
        return value
    unit = unit.strip()
    return value * _SCALES.get(unit, _MEMORY.get(unit, 1.0))


def number_in(text: str) -> float | None:
    """Return the number that a text is, with a unit or a total behind it, or None.

    Of ``12/100`` it is 12; of ``np.float64(0.5)`` and ``tensor(0.5, device='cuda:0')``, 0.5.
    """
    text = text.strip()
    match = _VALUE.fullmatch(text)
    if match is not None:
        return scaled(match[1], match[2])
    match = _WRAPPED.fullmatch(text)
    if match is not None and (match := _VALUE.fullmatch(match[1].strip())):
        return scaled(match[1], match[2])
    return None


def fields(text: str, between: str, sign: str = ":") -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of ``name: 1.2 | name: 3``, split at `between`."""
    for part in text.split(between):
        name, found, value = part.rpartition(sign)
        number = number_in(value) if found else None
        if number is not None and (name := name.strip()):
            yield name, number


_PAIR: Final = re.compile(
    rf"(?<![\w/.@%()-])([A-Za-z_][\w/.@%()-]{{0,100}}+) ?[:=] {{0,12}}+"
    rf"({NUMBER})({UNIT})?+(?![\w:]|\.\d)"
)


def pairs(text: str) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of ``name: 1.2  other=3%``, where names hold no spaces."""
    for match in _PAIR.finditer(text):
        yield match[1], scaled(match[2], match[3])
