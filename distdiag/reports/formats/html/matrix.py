"""What ranks called in each process group, number by number, and where they first differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome
from distdiag.reports.formats.html.calls import Call, Calls, GroupKey, place, what
from distdiag.reports.words import ranks_by_key

BEFORE: Final = 5
AFTER: Final = 4
"""So many collectives before the first difference are shown, and so many after it."""
MOST_GROUPS: Final = 24
MOST_COLUMNS: Final = 16
"""Ranks that called the same are one column; more columns than these are not read by anyone."""


class Cell(msgspec.Struct):
    """What ranks of one column called: `text` (empty: nothing), its line, how far it went.

    `is_odd`: it is not what most ranks called.
    """

    text: str
    place: str = ""
    state: str = ""
    is_odd: bool = False


class Row(msgspec.Struct):
    """One number of the group; `differs`: the ranks did not call the same."""

    number: int
    cells: list[Cell]
    differs: bool


class Matrix(msgspec.Struct):
    """The rows of one process group that are worth looking at.

    `columns` are ranks, equal ones together. `first` is the number of the first difference, -1 if
    there is none. `total` numbers were recorded.
    """

    group: str
    backend: str
    num_ranks: int
    columns: list[str]
    rows: list[Row]
    first: int
    total: int


def matrices_of(calls: Calls, outcome: Outcome) -> list[Matrix]:
    """Return what was called in each group, the groups with a difference first."""
    is_over = outcome is not Outcome.RUNNING
    found = [_matrix(key, by_rank, is_over=is_over) for key, by_rank in calls.by_group.items()]
    found.sort(key=lambda each: (each.first < 0, -each.num_ranks, -each.total))
    return found[:MOST_GROUPS]


def _matrix(key: GroupKey, by_rank: Mapping[int, Mapping[int, Call]], *, is_over: bool) -> Matrix:
    numbers = sorted({number for known in by_rank.values() for number in known})
    group = next(iter(next(iter(by_rank.values())).values())).event.group
    first = next((n for n in numbers if _differs(by_rank, n, is_over=is_over)), -1)
    at = numbers.index(first) if first >= 0 else len(numbers) - 1
    shown = numbers[max(0, at - BEFORE) : at + AFTER + 1]
    columns = ranks_by_key((_column(known, shown), (rank,)) for rank, known in by_rank.items())
    unheard = RankSet(set(key[1]) - by_rank.keys())
    # The largest column last on the left would hide the odd ones: the smallest come first.
    ordered = sorted(columns.items(), key=lambda item: (-len(item[1]), min(item[1])))
    kept = ordered[:MOST_COLUMNS]
    rows = [_row(number, [by_rank[min(ranks)] for _, ranks in kept]) for number in shown]
    names = [ranks.phrase() for _, ranks in kept]
    if len(ordered) > MOST_COLUMNS:
        names[-1] += f" (and {len(ordered) - MOST_COLUMNS} more columns)"
    if unheard:
        names[-1] += f" ({unheard.phrase()}: no records)"
    return Matrix(
        group=group.label,
        backend=group.backend,
        num_ranks=len(key[1]),
        columns=names,
        rows=rows,
        first=first,
        total=len(numbers),
    )


def _differs(by_rank: Mapping[int, Mapping[int, Call]], number: int, *, is_over: bool) -> bool:
    """Say whether ranks called unlike things, or one never came although the run is over."""
    there = {_kind(known[number].event) for known in by_rank.values() if number in known}
    if len(there) > 1:
        return True
    return is_over and any(
        number not in known and max(known, default=-1) < number for known in by_rank.values()
    )


def _kind(call: Collective) -> tuple[object, ...]:
    """Return what must be the same on all ranks of a group."""
    signature = call.signature
    # Rows of an all-to-all and of gathers of parts may differ; so may what only a root gives.
    is_alike = signature.op.startswith(("all_reduce", "broadcast"))
    sizes = signature.input_sizes if is_alike else ()
    return (signature.op, sizes, signature.dtypes if is_alike else (), signature.root)


def _column(known: Mapping[int, Call], shown: list[int]) -> tuple[object, ...]:
    return tuple(
        (what(known[n].event), place(known[n].event), known[n].state) if n in known else None
        for n in shown
    )


def _row(number: int, columns: list[Mapping[int, Call]]) -> Row:
    usual = next((_kind(known[number].event) for known in columns if number in known), None)
    cells = []
    for known in columns:
        call = known.get(number)
        if call is None:
            never = max(known, default=-1) < number
            cells.append(Cell("never called" if never else "not recorded", is_odd=never))
            continue
        is_odd = _kind(call.event) != usual
        cells.append(Cell(what(call.event), place(call.event), call.state, is_odd))
    return Row(number, cells, any(cell.is_odd for cell in cells))
