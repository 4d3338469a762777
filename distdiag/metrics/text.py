"""How runs and what their curves tell read at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from distdiag.findings.finding import Severity
from distdiag.metrics.assertions import Verdict
from distdiag.metrics.compare import Comparison
from distdiag.metrics.judging import Judgement, Observation
from distdiag.metrics.judging.observation import Point, spell_step, spell_value
from distdiag.metrics.runs import Run
from distdiag.metrics.summary import Row, main_track, sparkline
from distdiag.record.visible import visible
from distdiag.reports.base import short
from distdiag.reports.words import count, severity_word

MARKS: Final = "▁▂▃▄▅▆▇█"
PLAIN_MARKS: Final = "_.-~=+*#"
"""For terminals whose encoding has no blocks."""
WORDS: Final = {Severity.ERROR: "ERROR", Severity.WARNING: "WARNING", Severity.INFO: "NOTE"}
LABEL_WIDTH: Final = 8
MOST_SHOWN: Final = 20
"""So many observations are shown of one severity; JSON has all of them."""
MOST_PARTINGS: Final = 12
LONGEST_NAME: Final = 32
HEAD: Final = ("series", "ranks", "values", "steps", "first", "last", "min", "max")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """All that one call of `distdiag metrics` has to say."""

    series: tuple[Row, ...]
    judgement: Judgement
    assertions: tuple[Verdict, ...] = ()
    comparison: Comparison | None = None
    problems: tuple[str, ...] = ()


Line = tuple[str, str]
"""A text, and its style: ``bold``, a severity, or nothing."""


def lines_of(
    shown: Shown, runs: Sequence[Run], *, width: int = 80, marks: str = MARKS
) -> Iterator[Line]:
    """Yield the lines for a terminal of this width."""
    yield from _verdict(shown, len(runs))
    for run in runs:
        yield "", ""
        yield from _run(run, [r for r in shown.series if r.run == run.name], width, marks)
    if shown.comparison is not None:
        yield "", ""
        yield from _comparison(shown.comparison, width)
    for severity in Severity:
        seen = [each for each in shown.judgement.observations if each.severity is severity]
        for each in seen[:MOST_SHOWN]:
            yield "", ""
            yield from _observation(each, width, several=len(runs) > 1)
        if len(seen) > MOST_SHOWN:
            yield "", ""
            yield f"and {count(len(seen) - MOST_SHOWN, 'more ' + severity_word(severity))}", ""
    if shown.assertions:
        yield "", ""
    for verdict in shown.assertions:
        yield from _assertion(verdict, width)


def _verdict(shown: Shown, num_runs: int) -> Iterator[Line]:
    seen = shown.judgement.observations
    counts = [
        count(number, severity_word(severity))
        for severity in Severity
        if (number := sum(each.severity is severity for each in seen))
    ]
    found = ", ".join(counts) or "nothing found"
    failed = sum(not verdict.holds for verdict in shown.assertions)
    more = f"; {count(failed, 'assertion')} not met" if failed else ""
    yield f"distdiag: {found} in {count(num_runs, 'run')}{more}.", "bold"


def _run(run: Run, rows: list[Row], width: int, marks: str) -> Iterator[Line]:
    formats = ", ".join(dict.fromkeys(curves.format for curves in run.curves))
    ranks = sorted({curves.rank for curves in run.curves if curves.rank is not None})
    attempts = len({curves.attempt for curves in run.curves})
    parts = [f"{run.name}: {formats}"]
    parts += [count(len(ranks), "rank")] if ranks else []
    parts += [count(attempts, "attempt")] if attempts > 1 else []
    yield visible(", ".join(parts)), "bold"
    track = main_track(run, [row.series for row in rows])
    if track is not None:
        name = f"  {visible(track.series.name)[:LONGEST_NAME]} "
        yield name + sparkline(track.series.values, max(width - len(name) - 1, 10), marks), ""
    yield from _table(rows, width)


def _table(rows: Iterable[Row], width: int) -> Iterator[Line]:
    table = [HEAD, *(_cells(row) for row in rows)]
    kept = [0, *(c for c in range(1, len(HEAD)) if any(row[c] for row in table[1:]))]
    widths = {column: max(len(row[column]) for row in table) for column in kept}
    while len(kept) > 3 and sum(widths[column] + 2 for column in kept) > width:
        kept.pop()  # a narrow terminal has no room for the extremes
    for number, row in enumerate(table):
        cells = [row[0].ljust(widths[0])]
        cells += [row[column].rjust(widths[column]) for column in kept[1:]]
        yield "  " + "  ".join(cells).rstrip(), "bold" if number == 0 else ""


def _cells(row: Row) -> tuple[str, ...]:
    lost = f" ({row.num_not_finite} not finite)" if row.num_not_finite else ""
    numbers = (row.first, row.last, row.minimum, row.maximum)
    return (
        visible(row.series)[:LONGEST_NAME],
        short(row.ranks, 12) if row.ranks else "",
        f"{row.num_values}{lost}",
        f"{spell_step(row.first_step)}-{spell_step(row.last_step)}",
        *("-" if number is None else spell_value(number) for number in numbers),
    )


def _paragraph(label: str, text: str, width: int) -> Iterator[Line]:
    indent = "  " + " " * LABEL_WIDTH if label else "  "
    first = f"  {label:{LABEL_WIDTH}}" if label else "  "
    wrapped = textwrap.wrap(
        visible(text),
        max(width - 1, 40),
        break_on_hyphens=False,
        initial_indent=first,
        subsequent_indent=indent,
    )
    yield from ((line, "") for line in wrapped)


def _points(points: Iterable[Point]) -> Iterator[Line]:
    for number, point in enumerate(points):
        # A path stays in one piece.
        yield f"  {'' if number else 'seen':{LABEL_WIDTH}}{visible(str(point))}", ""


def _observation(seen: Observation, width: int, *, several: bool) -> Iterator[Line]:
    where = f" ({visible(seen.run)})" if several else ""
    ranks = f" of ranks {short(seen.ranks)}" if len(seen.ranks) > 1 else ""
    ranks = f" of rank {seen.ranks}" if len(seen.ranks) == 1 else ranks
    attempt = f", attempt {seen.attempt}" if seen.attempt else ""
    head = f"{WORDS[seen.severity]} {seen.kind}: {visible(seen.series)}{ranks}{attempt}{where}"
    yield head, seen.severity.value
    yield from _paragraph("", seen.message + ".", width)
    yield from _points(seen.evidence)
    if seen.severity is not Severity.INFO:
        yield from _paragraph("next", seen.look_next, width)


def _comparison(comparison: Comparison, width: int) -> Iterator[Line]:
    yield visible(f"{comparison.first} (first) and {comparison.second} (second)"), "bold"
    differing = [each for each in comparison.partings if each.first_difference is not None]
    equal = [each.series for each in comparison.partings if each.first_difference is None]
    for parting in differing[:MOST_PARTINGS]:
        yield from _paragraph("", parting.message + ".", width)
        yield from _points(parting.evidence)
    if len(differing) > MOST_PARTINGS:
        yield f"  and {len(differing) - MOST_PARTINGS} more series that differ", ""
    if equal:
        where = "in all steps that both runs have"
        yield from _paragraph("", f"equal to the last digit {where}: {', '.join(equal)}.", width)
    for reason in comparison.not_compared[:MOST_PARTINGS]:
        yield from _paragraph("", f"not compared: {reason}", width)


def _assertion(verdict: Verdict, width: int) -> Iterator[Line]:
    style = "" if verdict.holds else Severity.ERROR.value
    state = "holds" if verdict.holds else "NOT MET"
    yield visible(f"assertion {verdict.assertion} {state}: {verdict.run}"), style
    if not verdict.holds:
        yield from _paragraph("", verdict.why + ".", width)
