"""What the pictures of the page are drawn from, as JSON that can stand within HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Report
from distdiag.record.visible import visible
from distdiag.reports.base import cut
from distdiag.reports.formats.html.calls import read_calls
from distdiag.reports.formats.html.curves import Chart, Usage, charts_of, usages_of
from distdiag.reports.formats.html.lanes import Lanes, lanes_of
from distdiag.reports.formats.html.matrix import Matrix, matrices_of
from distdiag.reports.formats.html.stacks import Tree, trees_of
from distdiag.reports.formats.html.waits import WaitGraph, waits_of
from distdiag.reports.recording import Recording
from distdiag.reports.words import by_severity

LONGEST_TEXT: Final = 400
MOST_FIRST: Final = 8
"""More ranks than these are not set apart from the others."""
_UNSAFE: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
"""What could end the script element that holds the JSON, or begin a comment in it."""


class Pictures(msgspec.Struct, frozen=True):
    """The data of all pictures; those that are None or empty have none."""

    lanes: Lanes | None
    matrices: list[Matrix]
    waits: WaitGraph | None
    trees: list[Tree]
    charts: list[Chart]
    routing: list[Chart]
    usages: list[Usage]

    def to_json(self) -> str:
        """Return JSON without any character that HTML would read, and without controls."""
        tree = _safe(msgspec.to_builtins(self))
        return msgspec.json.encode(tree).decode().translate(_UNSAFE)


def pictures_of(report: Report, recording: Recording) -> Pictures:
    """Gather what the recording of a run can show."""
    calls = read_calls(recording)
    charts, routing = charts_of(recording)
    return Pictures(
        lanes=lanes_of(recording, calls, _culprits(report)),
        matrices=matrices_of(calls, report.run.outcome),
        waits=waits_of(report, calls),
        trees=trees_of(recording),
        charts=charts,
        routing=routing,
        usages=usages_of(recording),
    )


def _culprits(report: Report) -> RankSet:
    """Return the ranks that findings name, where they are few."""
    worst = by_severity(report.findings)[:1]
    ranks = worst[0].ranks if worst else RankSet()
    return ranks if len(ranks) <= MOST_FIRST else RankSet()


def _safe(value: object) -> object:
    """Spell out what is no printable text, and cut what is endless."""
    if isinstance(value, str):
        return visible(cut(value, LONGEST_TEXT))
    if isinstance(value, list | tuple):
        return [_safe(each) for each in value] if not _is_numbers(value) else value
    if isinstance(value, dict):
        return {key: _safe(each) for key, each in value.items()}
    return value


def _is_numbers(values: Sequence[object]) -> bool:
    return all(isinstance(each, int) for each in values)
