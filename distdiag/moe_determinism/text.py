"""The comparison as text: choices that differ, and the margins of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from distdiag.moe_determinism.comparison import Result, Row
from distdiag.reasoning.routing_differences import bin_label
from distdiag.routing_difference import MarginBin

_MOST_ROWS: Final = 20
_WIDTH: Final = 24


def table(result: Result) -> str:
    """Return the choices that differ, and a histogram of the margins."""
    return "\n".join([*_rows(result.rows), *_histogram(result.margins)])


def _rows(rows: Sequence[Row]) -> list[str]:
    flipped = sorted(
        (row for row in rows if row.num_flipped), key=lambda row: (row.step, row.micro)
    )
    if not flipped:
        return []
    lines = ["step  micro  rank  flipped  of tokens  greatest margin (roundings)  layer"]
    lines += (
        f"{row.step:4d}  {row.micro:5d}  {row.rank:4d}  {row.num_flipped:7d}  "
        f"{row.num_tokens:9d}  {row.greatest_flipped:27.4g}  {_layer(row)}"
        for row in flipped[:_MOST_ROWS]
    )
    if len(flipped) > _MOST_ROWS:
        lines.append(f"… and {len(flipped) - _MOST_ROWS} more")
    return [*lines, ""]


def _layer(row: Row) -> str:
    name = row.layer.partition("/")[2] or row.layer
    call = f" call {row.call}" if row.call else ""
    return f"{name}{call}{' (repeated pass)' if row.is_recompute else ''}"


def _histogram(margins: Sequence[MarginBin]) -> list[str]:
    greatest = max((each.num_tokens for each in margins), default=0)
    lines = [f"{'margin of the choice':24}  {'tokens':>9}  {'flipped':>8}  rounding may explain it"]
    for each in margins:
        bar = "#" * -(-each.num_tokens * _WIDTH // max(1, greatest))
        answer = "yes" if each.is_numeric else "no"
        lines.append(
            f"{bin_label(each):24}  {each.num_tokens:9d}  {each.num_flipped:8d}  {answer:3}  {bar}"
        )
    return [line.rstrip() for line in lines]
