"""The report as Markdown: a comment on a pull request, or the summary of a job."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import ClassVar, Final

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Location, Report, Severity
from distdiag.record.visible import visible
from distdiag.reports.base import Reporter, cut, short
from distdiag.reports.gate import hint
from distdiag.reports.places import relative_path
from distdiag.reports.words import by_severity, count, ending_of, found_phrase

LONGEST: Final = 60_000
"""GitHub takes 65,536 characters in a comment; what comes after is named and left out."""
LONGEST_TEXT: Final = 1500
MOST_DIAGNOSES: Final = 500
"""The shortest that a diagnosis can be fills a comment with so many."""
MOST_EVIDENCE: Final = 8
MOST_IGNORED: Final = 20
_MARKUP: Final = re.compile(r"[\\`*{}\[\]<>()#+!|~&$@]|:(?=\S)|(?<!\w)_|_(?!\w)")


class MarkdownReporter(Reporter):
    """Write each finding as a diagnosis; notes stand folded at the end."""

    name: ClassVar[str] = "markdown"
    file_name: ClassVar[str | None] = "report.md"

    def render(self, report: Report) -> str:
        """Return the Markdown."""
        ordered = by_severity(report.findings)
        alarms = [f for f in ordered if f.severity is not Severity.INFO]
        notes = [f for f in ordered if f.severity is Severity.INFO]
        left_out = max(0, len(alarms) - MOST_DIAGNOSES)
        shown = map(diagnosis, alarms[:MOST_DIAGNOSES])
        blocks = chain(_head(report), shown, _folded_notes(notes), _foot(report))
        return "\n\n".join(_within(blocks, left_out)) + "\n"


def _within(blocks: Iterable[str], left_out: int) -> Iterator[str]:
    """Yield the blocks that there is room for, and say how many more there are."""
    room = LONGEST
    for block in blocks:
        if len(block) > room:
            left_out += 1
        else:
            room -= len(block) + 2
            yield block
    if left_out:
        yield f"*{left_out} more parts are in report.json.*"


def _head(report: Report) -> Iterator[str]:
    yield f"## distdiag: {found_phrase(report)}; {ending_of(report)}"
    if silent := report.silent_ranks:
        yield f"**{_who(silent)} not observed: nothing here is about them.**"


def diagnosis(finding: Finding) -> str:
    """Return symptom, place, evidence, why, fix, what it changes, doubt and certainty."""
    parts = [f"### {_heading(finding)}", f"**Symptom.** {_plain(finding.message)}"]
    parts += _place(finding.location)
    parts.append(f"**Root cause.** {_culprit(finding)}")
    parts.append("\n".join(_evidence(finding.evidence)))
    labelled = (
        ("Why", finding.why),
        (f"Fix{_at(finding.location)}", finding.fix),
        ("The fix also changes", finding.fix_changes),
        ("The fix leaves", finding.fix_leaves),
        ("It would be disproved by", finding.disproof),
    )
    parts += [f"**{label}.** {_plain(text)}" for label, text in labelled if text]
    parts.append(f"**Confidence.** {finding.grade}, {finding.confidence:.0%}")
    return "\n\n".join(part for part in parts if part)


def _heading(finding: Finding) -> str:
    return f"{finding.severity.upper()} {_plain(finding.code)} {_plain(finding.name)}"


def _culprit(finding: Finding) -> str:
    who = f"{_who(finding.ranks)}" if finding.ranks else "No rank in particular"
    step = f", in step {finding.step}" if finding.step is not None else ""
    about = ", ".join(map(_code, finding.subjects[:MOST_EVIDENCE]))
    more = len(finding.subjects) - MOST_EVIDENCE
    about += f" and {more} more" if more > 0 else ""
    return f"{who}{step}{f': {about}' if about else ''}"


def _place(location: Location | None) -> list[str]:
    if location is None:
        return []
    where = f"{_code(f'{relative_path(location.file)}:{location.line}')} in "
    source = [_block(location.source)] if location.source else []
    return [f"{where}{_code(location.function)}", *source]


def _at(location: Location | None) -> str:
    return f" at {_code(f'{relative_path(location.file)}:{location.line}')}" if location else ""


def _evidence(entries: tuple[Evidence, ...]) -> Iterator[str]:
    for entry in entries[:MOST_EVIDENCE]:
        who = f"{_who(entry.ranks)}: " if entry.ranks else ""
        yield f"- {who}{_plain(entry.summary)}{_at(entry.location)}"
    if len(entries) > MOST_EVIDENCE:
        yield f"- and {len(entries) - MOST_EVIDENCE} more: see report.json"


def _folded_notes(notes: list[Finding]) -> Iterator[str]:
    if notes:
        rows = [
            f"- {_code(note.code)}{_at(note.location)}: {_plain(note.message)}"
            for note in notes[:MOST_IGNORED]
        ]
        lines = "\n".join(rows)
        yield f"<details><summary>{count(len(notes), 'note')}</summary>\n\n{lines}\n\n</details>"


def _foot(report: Report) -> Iterator[str]:
    looked = f"{len(report.checked)} checks looked, {len(report.not_checked)} did not"
    counts = report.counts
    known = f"; ignored: {counts.ignored}; known by the baseline: {counts.baselined}"
    yield f"{looked}{known if counts.ignored or counts.baselined else ''}."
    rows = [
        f"- {_code(each.finding.code)}{_at(each.finding.location)}: ignored by {each.by}"
        f"{f': {_plain(each.reason)}' if each.reason else ''}"
        for each in report.ignored[:MOST_IGNORED]
    ]
    if rows:
        lines = "\n".join(rows)
        yield f"<details><summary>Ignored</summary>\n\n{lines}\n\n</details>"
    if last := hint(report).removeprefix("distdiag: ").strip():
        yield last


def _who(ranks: RankSet) -> str:
    return f"Rank {ranks}" if len(ranks) == 1 else f"Ranks {short(ranks)}"


def _plain(text: str) -> str:
    """Return text that no sign in it changes: no markup, no HTML, no mention, no reference."""
    shown = visible(cut(" ".join(text.split()), LONGEST_TEXT))
    escaped = _MARKUP.sub(r"\\\g<0>", shown)
    # A backslash does not keep GitHub from calling a person or another issue; a comment does.
    return re.sub(r"\\([@#])(?=\w)", r"\1<!-- -->", escaped)


def _code(text: str) -> str:
    """Return text as a code span, whatever backticks it holds."""
    shown = visible(cut(text, LONGEST_TEXT)) or " "
    fence = "`" * (_longest_run(shown) + 1)
    room = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{room}{shown}{room}{fence}"


def _block(text: str) -> str:
    """Return a line of source as a code block."""
    shown = visible(cut(text, LONGEST_TEXT))
    fence = "`" * max(3, _longest_run(shown) + 1)
    return f"{fence}python\n{shown}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
