"""The contract of a format of lines: what a console shows of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Follow = Callable[[str], Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one line says.

    `start` is where the text of the program begins: what stands before it tells who wrote it.
    The other fields are those of a `Record`. `follow` reads the lines after it, up to the one for
    which it returns None. `is_repeated`: a bar of progress draws the same values again and again.
    `why` is what is wrong with a line that is no point of a curve for that reason.
    """

    values: Mapping[str, float]
    start: int = 0
    step: float | None = None
    epoch: float | None = None
    per_epoch: float | None = None
    time: float = 0.0
    rank: int | None = None
    follow: Follow | None = None
    is_repeated: bool = False
    is_weak: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class LineFormat:
    """One format of lines. Only lines that hold one of `anchors` are given to `read`.

    `read` returns None for a line of another format. A line is at most 64 KiB long.
    """

    name: str
    anchors: tuple[bytes, ...]
    read: Callable[[str], Parsed | None]


def named(pairs: Iterable[tuple[str, float]], prefix: str = "") -> dict[str, float]:
    """Return the pairs by name; of a name that comes twice, the first counts."""
    found: dict[str, float] = {}
    for name, value in pairs:
        found.setdefault(prefix + name, value)
    return found
