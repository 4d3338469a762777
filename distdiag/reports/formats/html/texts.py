"""The texts of the page: findings, their places, ranks, coverage, each cut to what can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Location, Report
from distdiag.findings.source import lines_around
from distdiag.record.exception_text import LONGEST_TRACEBACK
from distdiag.record.visible import visible
from distdiag.reports.base import cut, phrase
from distdiag.reports.words import (
    codes_by_reason,
    grouped,
    ranks_by_key,
    severity_word,
    shown_path,
    shown_text,
)

LONGEST_TEXT: Final = 4000
LONGEST_LINE: Final = 300
LONGEST_SPLIT: Final = 100_000
"""Paths are shortened in texts up to this length."""
MOST_FINDINGS: Final = 300
MOST_GROUPS: Final = 24
"""So many groups of ranks of a finding are in the page; report.json has the others."""
MOST_VALUES: Final = 40
MOST_ROWS: Final = 200
CONTEXT: Final = 2
"""So many lines of source before and after the one of a finding."""


def safe(text: str, most: int = LONGEST_TEXT) -> str:
    """Return a text with its controls spelled out; of a long one what matters is the end."""
    text = shown_text(text) if len(text) < LONGEST_SPLIT else text
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n… {len(text) - most:,} characters …\n{text[-half:]}"
    return "\n".join(visible(line) for line in text.split("\n"))


def finding_texts(finding: Finding) -> dict[str, Any]:
    """Return what the page says of one finding."""
    groups = list(grouped(finding))
    if len(groups) > MOST_GROUPS:
        groups.sort(key=lambda item: (item[0].isdisjoint(finding.ranks), -len(item[0])))
    rest = len(groups) - MOST_GROUPS
    return {
        "code": safe(finding.code, 40),
        "name": safe(finding.name, 80),
        "severity": severity_word(finding.severity),
        "message": safe(finding.message),
        "ranks": phrase(finding.ranks) if finding.ranks else "",
        "step": finding.step,
        "certainty": f"{finding.grade} ({finding.confidence:.0%})",
        "place": place_texts(finding.location),
        "fix": safe(finding.fix),
        "evidence": [
            _group(ranks, entries, finding.location) for ranks, entries in groups[:MOST_GROUPS]
        ],
        "left_out": f"{rest} more groups of ranks are in report.json." if rest > 0 else "",
        "explanation": [
            (label, safe(text))
            for label, text in (
                ("Subjects", ", ".join(finding.subjects)),
                ("Why", finding.why),
                ("The fix also changes", finding.fix_changes),
                ("The fix leaves", finding.fix_leaves),
                ("Wrong if", finding.disproof),
            )
            if text
        ],
    }


def _group(ranks: RankSet, entries: list[Evidence], known: Location | None) -> dict[str, Any]:
    """Return what was seen of some ranks; the lines of a place that is `known` are not repeated."""
    return {
        "ranks": phrase(ranks) if ranks else "rank not known",
        "entries": [
            {
                "summary": safe(entry.summary),
                "place": place_texts(entry.location, with_lines=entry.location != known),
                "figures": [
                    (safe(key, 80), safe(str(value), LONGEST_TRACEBACK))
                    for key, value in list(entry.values.items())[:MOST_VALUES]
                ],
            }
            for entry in entries[:MOST_VALUES]
        ],
    }


def place_texts(location: Location | None, *, with_lines: bool = True) -> dict[str, Any] | None:
    """Return a place with the lines around it, as ``(number, text, is the line itself)``."""
    if location is None:
        return None
    around = _lines(location) if with_lines else []
    lines = [(n, safe(text, LONGEST_LINE), n == location.line) for n, text in around]
    return {
        "where": safe(f"{shown_path(location.file)}:{location.line}", LONGEST_LINE),
        "function": safe(location.function, LONGEST_LINE),
        "lines": lines,
    }


def _lines(location: Location) -> list[tuple[int, str]]:
    around = lines_around(location, CONTEXT)
    while around and not around[0][1].strip():
        del around[0]
    while around and not around[-1][1].strip():
        del around[-1]
    return around or ([(location.line, location.source)] if location.source else [])


def run_texts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what is known of the run, label and text."""
    run = report.run
    yield "command", safe(" ".join(shown_path(part) for part in run.command), 600)
    yield "ranks", str(run.world_size)
    yield "torch", safe(run.torch, 80) or "not loaded"
    yield "from", safe(run.started, 40)
    if run.ended:
        yield "to", safe(run.ended, 40)
    if run.attempts > 1:
        yield "attempts", str(run.attempts)
    if run.active_modes:
        yield "active", safe(", ".join(run.active_modes), 200)
    if run.dump_transport:
        yield "dumps by", safe(run.dump_transport, 80)


def rank_texts(report: Report) -> list[tuple[str, str, str]]:
    """Return which ranks came to which end, and what they did last."""
    ends = ranks_by_key(((info.fate, info.last), (info.rank,)) for info in report.run.ranks)
    rows = sorted(ends.items(), key=lambda item: len(item[1]))
    return [
        (phrase(ranks), safe(fate, 80), safe(last, 600)) for (fate, last), ranks in rows[:MOST_ROWS]
    ]


def gap_texts(report: Report) -> list[tuple[str, str]]:
    """Return which checks did not look, and why."""
    return [
        (safe(", ".join(codes), 600), safe(reason, 600))
        for reason, codes in list(codes_by_reason(report).items())[:MOST_ROWS]
    ]


def file_texts(report: Report) -> list[tuple[str, str]]:
    """Return what a post-mortem has read."""
    rows = []
    for file in report.files[:MOST_ROWS]:
        whose = f" of {phrase(file.ranks)}" if file.ranks else ""
        what = f"{' and '.join(file.kinds)}{whose}" if file.kinds else ""
        rows.append(
            (safe(cut(file.path, 400)), safe("; ".join(filter(None, [what, file.problem]))))
        )
    return rows
