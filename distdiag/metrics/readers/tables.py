"""Tables of values between commas, tabs or semicolons: a header, and a row for each step."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.metrics.readers.found import Found
from distdiag.metrics.readers.mappings import as_number, parsed_mapping
from distdiag.metrics.readers.records import Collector, Record
from distdiag.metrics.readers.sources import Block

_SEPARATORS: Final = ",\t;"
_MOST_COLUMNS: Final = 10_000
_LONGEST_NAME: Final = 300


def separator_of(head: str) -> str:
    """Return what separates the columns of a table that begins like this, ``""`` if it is none.

    A table has a header of two or more names, and a row of as many values, most of them numbers.
    """
    lines = [line for line in head.splitlines() if line.strip()][:2]
    if len(lines) < 2 or lines[0].lstrip()[:1] in ("{", "[", "("):
        return ""
    for separator in _SEPARATORS:
        try:
            rows = list(csv.reader(lines, delimiter=separator))
        except csv.Error:
            continue
        if len(rows) == 2 and len(rows[0]) >= 2 and _is_table(*rows):
            return separator
    return ""


def _is_table(header: Sequence[str], row: Sequence[str]) -> bool:
    names = [name.strip() for name in header]
    if any(as_number(name) is not None or len(name) > _LONGEST_NAME for name in names):
        return False
    if len(row) != len(header) or len(set(names)) < len(names) - 1:
        return False
    filled = [value for value in row if value.strip()]
    numbers = sum(as_number(value) is not None for value in filled)
    return numbers > 0 and 2 * numbers >= len(filled)


def read_table(blocks: Iterator[Block], separator: str, collector: Collector, found: Found) -> None:
    """Read a table; a header that is repeated begins a new attempt."""
    rows = csv.reader(_lines(blocks), delimiter=separator)
    names: list[str] = []
    while True:
        first = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            found.say(f"this row is no row of a table, and the rest is not read: {error}", first)
            return
        if not row or (len(row) == 1 and not row[0].strip()):
            continue
        if not names or _is_header(row, names):
            if names:
                collector.begin()
            names = [name.strip() for name in row[:_MOST_COLUMNS]]
        elif len(row) != len(names):
            found.say(f"this row has {len(row)} values, and the header {len(names)} names", first)
        else:
            _add(collector, names, row, first)


def _is_header(row: Sequence[str], names: Sequence[str]) -> bool:
    return len(row) > 1 and row[0].strip() == names[0] and as_number(row[-1]) is None


def _add(collector: Collector, names: Sequence[str], row: Sequence[str], line: int) -> None:
    cells = {name or "unnamed": value for name, value in zip(names, row, strict=True) if value}
    parsed = parsed_mapping(cells)
    if parsed is not None:
        record = Record(
            parsed.values, parsed.step, line, parsed.epoch, time=parsed.time, is_weak=parsed.is_weak
        )
        collector.add("csv", record)


def _lines(blocks: Iterator[Block]) -> Iterator[str]:
    for block in blocks:
        for line in block.data.decode("utf-8", "replace").split("\n"):
            yield line.replace("\r", "") + "\n"
