"""Writes the test: one function for each call of the program, and who made which, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from textwrap import fill
from typing import Final, NamedTuple

from distdiag.event import Collective, Frame
from distdiag.ranks import RankSet
from distdiag.replay.divergence import Divergence
from distdiag.replay.repeats import Repeat, repeats
from distdiag.replay.statements import statement
from distdiag.reports.base import visible

WIDTH: Final = 88
TIMEOUT_S: Final = 30

_NO_WORD: Final = re.compile(r"\W+", re.ASCII)


class _Function(NamedTuple):
    """A function of the test. Calls from the same line with the same arguments share one."""

    place: Frame | None
    line: str


def test_source(divergence: Divergence) -> str:
    """Return the text of a test file."""
    made = {
        rank: [_function_of(call, rank) for call in calls]
        for rank, calls in sorted(divergence.calls.items())
    }
    names = _names(made)
    group = divergence.group
    ranks = sorted(group.ranks)
    is_world = len(ranks) == divergence.world_size
    opening = "dist.group.WORLD" if is_world else f"dist.new_group({ranks})"
    label = visible(group.label)
    return "\n".join(
        [
            f'"""{_docstring(divergence)}\n"""',
            "\nimport pytest\nimport torch\nimport torch.distributed as dist\n",
            *(line for function in names for line in _define(function, names[function])),
            f"\nCALLS = {{  # in process group {label}, by rank",
            *(line for rank in ranks for line in _program(rank, made.get(rank, ()), names)),
            "}\n\n",
            f'@pytest.mark.distdiag(world_size={divergence.world_size}, backend="gloo", '
            f"timeout={TIMEOUT_S})",
            f"def test_collectives_of_{_word(label)}():",
            f"    group = {opening}",
            "    for call in CALLS.get(dist.get_rank(), []):",
            "        call(group)\n",
        ]
    )


def _docstring(divergence: Divergence) -> str:
    finding = divergence.finding
    ranks = RankSet(divergence.group.ranks).phrase()
    paragraphs = (
        f"What {ranks} of run {divergence.run_id} called, up to {finding.code} {finding.name}.",
        finding.message,
        "Each function makes one call of the program again, on zeros. CALLS tells which of them "
        "each rank made, in order. Correct CALLS or a function as you mean to correct the program: "
        "the test passes when the calls of all ranks fit together.",
    )
    safe = [visible(" ".join(p.split())).replace("\\", "\\\\") for p in paragraphs]
    return "\n\n".join(fill(p.replace('"', "'"), WIDTH, break_long_words=False) for p in safe)


def _function_of(call: Collective, rank: int) -> _Function:
    line = statement(call.signature, is_root=call.signature.root == rank)
    return _Function(call.site.location, line)


def _names(made: Mapping[int, Sequence[_Function]]) -> dict[_Function, str]:
    """Name the functions after the lines they stand for, in the order of their first calls."""
    names: dict[_Function, str] = {}
    taken: dict[str, int] = {}
    for function in (each for functions in made.values() for each in functions):
        if function in names:
            continue
        place = function.place
        stem = f"{_word(PurePath(place.file).stem)}_{place.line}" if place else "call"
        taken[stem] = taken.get(stem, 0) + 1
        suffix = f"_{taken[stem]}" if taken[stem] > 1 else ""
        names[function] = f"line_of_{stem}{suffix}"
    return names


def _word(text: str) -> str:
    return _NO_WORD.sub("_", text).strip("_").lower() or "group"


def _define(function: _Function, name: str) -> Iterator[str]:
    place = function.place
    yield f"\ndef {name}(group):"
    if place is not None:
        yield f"    # {visible(place.file)}:{place.line} in {visible(place.function)}"
    yield f"    {function.line}\n"


def _program(
    rank: int, functions: Sequence[_Function], names: Mapping[_Function, str]
) -> Iterator[str]:
    yield f"    {rank}: ["
    for repeat in repeats([names[function] for function in functions]):
        yield from _entries(repeat)
    yield "    ],"


def _entries(repeat: Repeat) -> Iterator[str]:
    words = [str(word) for word in repeat.block]
    if repeat.times == 1:
        yield from (f"        {word}," for word in words)
    else:
        yield f"        *({repeat.times} * [{', '.join(words)}]),"
