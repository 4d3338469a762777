"""Which functions mention something at all: the others need no closer look."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from distdiag.lint.modules import Function, Module

_RANKS: Final = (
    "rank",
    "process_index",
    "main_process",
    "master",
    "is_main",
    "on_main",
    "process_zero",
    "global_zero",
    "chief",
    "procid",
    "localid",
    "on_local_process",
    "last_process",
    "is_primary",
    "is_coordinator",
    "is_lead",
)
_ASSIGNMENT: Final = re.compile(r"\s*(?:\w+\.)?(\w+)\s*(?::[^=]*)?=(?!=)")


def mentions(function: Function, words: tuple[str, ...]) -> bool:
    """Say whether the text of a function has one of the words, in any case."""
    return _has_line(function, _lines_with(function.module, words))


def mentions_ranks(function: Function) -> bool:
    """Say whether the text of a function names a rank, or something that was made of one."""
    return _has_line(function, _lines_of_ranks(function.module))


def _has_line(function: Function, lines: Sequence[int]) -> bool:
    first, last = function.extent
    at = bisect_left(lines, first)
    return at < len(lines) and lines[at] <= last


@lru_cache(maxsize=100)
def _lines_with(module: Module, words: tuple[str, ...]) -> tuple[int, ...]:
    places = (at for word in words for at in _places(module.lowered, word))
    return tuple(sorted({bisect_right(module.line_starts, at) for at in places}))


def _places(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + len(word))


@lru_cache(maxsize=100)
def _lines_of_ranks(module: Module) -> tuple[int, ...]:
    found = _lines_with(module, _RANKS)
    assignments = (_ASSIGNMENT.match(module.lines[number - 1]) for number in found)
    made = {match[1] for match in assignments if match is not None}
    unnamed = tuple(sorted(n for n in made if not any(word in n.lower() for word in _RANKS)))
    if not unnamed:
        return found
    names = re.compile(rf"\b(?:{'|'.join(unnamed)})\b")
    further = (number for number, line in enumerate(module.lines, 1) if names.search(line))
    return tuple(sorted({*found, *further}))
