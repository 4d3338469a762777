"""The report for a person at a terminal: the verdict first, then what it rests on."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from distdiag.events.base import Value
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import (
    Evidence,
    Finding,
    Grade,
    Location,
    Outcome,
    Report,
    Severity,
)
from distdiag.findings.source import lines_around
from distdiag.reports.base import Reporter, cut
from distdiag.reports.folding import Folded, folded, said_once
from distdiag.reports.terminal_page import INDENT, TerminalPage
from distdiag.reports.terminal_run import write_files, write_ignored, write_next_time, write_run
from distdiag.reports.words import (
    by_severity,
    codes_by_reason,
    count,
    coverage,
    grouped,
    is_healthy,
    severity_word,
    shown_path,
    shown_text,
    silence,
    verdict,
)

MOST_WHOLE: Final = 8
"""So many findings are written with all that they rest on, the others in a line each."""
MOST_SHORT: Final = 40
MOST_WHOLE_OF_DETAILS: Final = 100
MOST_SHORT_OF_DETAILS: Final = 1000
"""The same with --verbose: some 100 pages, 4 MB at worst. report.json has all of them."""
MOST_GROUPS: Final = 12
"""So many groups of ranks are shown one by one; report.json has the others."""
FEW_GROUPS: Final = 5
"""The same without --verbose."""
MOST_ENTRIES: Final = 4
MOST_SUBJECTS: Final = 6
MOST_DETAILS: Final = 64
"""So many entries of a group and subjects with --verbose."""
MOST_CODES: Final = 8
LONGEST_VALUE: Final = 200
LAST_LINES: Final = 24
"""So many lines of a traceback are shown behind its last frame, and before the end of it."""
STYLES: Final = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold cyan",
}
LEVELS: Final = {"ok": "bold green", "error": "bold red", "warning": "bold yellow"}


class TerminalReporter(Reporter):
    """Write plain lines, or coloured ones, for a given width."""

    name = "terminal"

    def render(self, report: Report) -> str:
        """Return the whole report as lines, of which a healthy run has two."""
        report = msgspec.structs.replace(report, findings=tuple(said_once(report.findings)))
        labels = {info.rank: info.label for info in report.run.ranks if info.label}
        page = TerminalPage(self.width, color=self.color, labels=labels)
        self._write_verdict(page, report)
        findings = by_severity(report.findings)
        if self.quiet:
            findings = [each for each in findings if each.severity is Severity.ERROR]
            self._write_findings(page, findings)
            return page.text() if findings else ""
        self._write_findings(page, findings)
        write_next_time(page, report)
        write_files(page, report)
        self._write_rest(page, report)
        return page.text()

    def _write_verdict(self, page: TerminalPage, report: Report) -> None:
        if unseen := silence(report):  # first, as all that follows is about the others
            page.write(f"distdiag: {unseen}", indent=0, style="bold")
        said = verdict(report)
        page.write(f"distdiag: {said.text}", indent=0, style=LEVELS.get(said.level, "bold"))
        if not report.complete and report.run.outcome is not Outcome.RUNNING:
            page.write("This report is provisional: the reporter was ended early.", indent=0)

    def _write_findings(self, page: TerminalPage, findings: list[Finding]) -> None:
        alarms = [each for each in findings if each.severity is not Severity.INFO]
        most_short = MOST_SHORT_OF_DETAILS if self.verbose else MOST_SHORT
        whole = (alarms or findings)[:MOST_WHOLE]
        if self.verbose:
            whole = findings[:MOST_WHOLE_OF_DETAILS]
        for each in folded(whole):
            _Writer(page, each, verbose=self.verbose).write()
        short = findings[len(whole) :]
        if not short:
            return
        page.blank()
        for finding in short[:most_short]:
            place = f"{_where(finding.location)}: " if finding.location else ""
            kind = f"{severity_word(finding.severity)} {finding.code}"
            page.write(f"{kind}: {place}{shown_text(finding.message)}")
        if rest := short[most_short:]:
            more = f"and {count(len(rest), 'more finding')} ({_codes(rest)})"
            page.write(f"{more}: see report.json")
        if not self.verbose:
            page.write("--verbose shows their evidence.", indent=2)

    def _write_rest(self, page: TerminalPage, report: Report) -> None:
        healthy = is_healthy(report)
        if report.files or not healthy:
            page.blank()
        page.write(coverage(report, is_whole=self.verbose), indent=0)
        write_ignored(page, report, verbose=self.verbose)
        if self.verbose:
            self._write_gaps(page, report)
        is_explained = any(each.severity is Severity.ERROR for each in report.findings)
        if self.verbose or not (healthy or is_explained) or report.silent_ranks:
            write_run(page, report, verbose=self.verbose)

    def _write_gaps(self, page: TerminalPage, report: Report) -> None:
        if not (report.not_checked or report.silent_ranks):
            return
        page.blank()
        page.write("Not looked at", indent=0, style="bold")
        if report.silent_ranks:
            page.write(f"{page.who(report.silent_ranks)}: silent, no events were read")
        for reason, codes in codes_by_reason(report).items():
            page.write(f"{', '.join(codes)}: {reason}")


class _Writer:
    """Writes one finding."""

    def __init__(self, page: TerminalPage, folded: Folded, *, verbose: bool) -> None:
        self._page = page
        self._folded = folded
        self._finding = folded.finding
        self._verbose = verbose
        self._shown: set[str] = set()

    def write(self) -> None:
        """Write what, where, who, why, and what to do."""
        page, finding = self._page, self._finding
        page.blank()
        head = f"{finding.severity.upper()} {finding.code} {finding.name}"
        page.write(head, indent=0, style=STYLES[finding.severity])
        page.write(shown_text(finding.message))
        self._write_place(finding.location)
        page.write_label("culprit", self._culprit())
        page.write_label("subjects", self._subjects())
        self._write_evidence()
        for each in self._folded.also:
            kind = f"{severity_word(each.severity)} {each.code} {each.name}"
            page.write_label("also", f"{kind}: {shown_text(each.message)}")
        if self._folded.is_repeated and not self._verbose:
            page.write_label("fix", f"as for {finding.code} above")
            return
        page.write_label("why", shown_text(finding.why))
        page.write_label("fix", shown_text(finding.fix), style="bold")
        if self._verbose:
            page.write_label("", _sentence("The fix also changes: ", finding.fix_changes))
            page.write_label("", _sentence("The fix leaves: ", finding.fix_leaves))
            page.write_label("wrong if", finding.disproof)

    def _culprit(self) -> str:
        finding = self._finding
        who = self._page.who(finding.ranks) if finding.ranks else "not known"
        step = f" in step {finding.step}" if finding.step is not None else ""
        is_certain = finding.grade is Grade.PROVEN
        sure = finding.grade if is_certain else f"{finding.grade}, {finding.confidence:.0%}"
        return f"{who}{step} ({sure})"

    def _subjects(self) -> str:
        names = [name for name in self._finding.subjects if name not in self._finding.message]
        most = MOST_DETAILS if self._verbose else MOST_SUBJECTS
        more = f" and {len(names) - most} more" if len(names) > most else ""
        return f"{', '.join(names[:most])}{more}"

    def _write_place(self, location: Location | None) -> None:
        """Write the place of the finding with the lines around it."""
        if location is None:
            return
        page = self._page
        self._shown.add(_where(location))
        page.write_whole(f"--> {_where(location)} in {location.function}", indent=2, style="bold")
        around = lines_around(location, 1)
        width = len(str(location.line + 1))
        self._shown |= {f"{shown_path(location.file)}:{number}" for number, _ in around}
        for number, text in around or [(location.line, location.source)] * bool(location.source):
            mark = ">" if number == location.line and len(around) > 1 else " "
            style = "bold" if number == location.line else "dim"
            head, line = f"    {mark} {number:>{width}} | ", cut(text, LONGEST_VALUE)
            if mark == ">":
                page.write_source(line, first=head, style=style)
            else:
                page.write_cut(f"{head}{line}", indent=0, style=style)

    def _write_evidence(self) -> None:
        page = self._page
        groups = list(grouped(self._finding))
        most = MOST_GROUPS if self._verbose else FEW_GROUPS
        if len(groups) > most:
            # The culprits and the large groups must be among those that are shown.
            culprits = self._finding.ranks
            groups.sort(key=lambda item: (item[0].isdisjoint(culprits), -len(item[0])))
        for ranks, entries in groups[:most]:
            self._write_group(ranks, entries)
        if len(groups) > most:
            others = count(len(groups) - most, "more group")
            page.write_label("evidence", f"and {others} of ranks: see report.json")

    def _write_group(self, ranks: RankSet, entries: list[Evidence]) -> None:
        page = self._page
        page.write_label("evidence", page.who(ranks) if ranks else "rank not known")
        most = MOST_DETAILS if self._verbose else MOST_ENTRIES
        # The last one sums up, or says where that was made which the finding names.
        shown = entries if len(entries) <= most else [*entries[: most - 1], entries[-1]]
        for entry in shown:
            summary = shown_text(entry.summary)
            place = entry.location
            where = _where(place) if place is not None else ""
            is_new = place is not None and where not in self._shown
            is_said = not where or is_new or where in summary or place == self._finding.location
            tail = "" if is_said else f" ({where.rpartition('/')[2]})"
            page.write(f"{summary}{tail}", indent=INDENT)
            if place is not None and is_new:
                self._shown.add(where)
                self._write_line(where, place.source.strip())
            self._write_values(entry)
        if len(entries) > most:
            where = "see report.json" if self._verbose else "--verbose shows them"
            page.write(f"and {len(entries) - most} more: {where}", indent=INDENT)

    def _write_line(self, where: str, source: str) -> None:
        """Write a place and its source, in one line where they fit."""
        page, indent = self._page, INDENT + 2
        if len(where) + len(source) + 2 <= page.width - indent:
            page.write_whole(f"{where}{_sentence(': ', source)}", indent=indent, style="dim")
            return
        page.write_whole(where, indent=indent, style="dim")
        page.write_source(cut(source, LONGEST_VALUE), first=" " * indent, style="dim")

    def _write_values(self, entry: Evidence) -> None:
        """Write raw values for those who ask for details, and a traceback that has no place."""
        page = self._page
        plain = []
        for key, value in entry.values.items():
            if isinstance(value, str) and "\n" in value.strip():
                if self._verbose or self._finding.location is None:
                    page.write(f"{key}:", indent=INDENT)
                    for line in _end_of(value):
                        page.write_whole(shown_text(line), indent=INDENT + 2)
            else:
                plain.append(_value(key, value))
        if self._verbose:
            page.write(", ".join(plain), indent=INDENT)


def _codes(findings: Iterable[Finding]) -> str:
    """Return ``12,000 REP001, 3 COL003``, the most frequent first."""
    numbers = Counter(finding.code for finding in findings).most_common()
    codes = [f"{number:,} {code}" for code, number in numbers[:MOST_CODES]]
    return ", ".join([*codes, *(["others"] if len(numbers) > MOST_CODES else [])])


def _where(location: Location | None) -> str:
    return f"{shown_path(location.file)}:{location.line}" if location is not None else ""


def _value(key: str, value: Value) -> str:
    return cut(f"{key} = {value}", LONGEST_VALUE)


def _end_of(text: str) -> Iterable[str]:
    """Yield a text of many lines, such as a traceback; of a long one its last frame to its end."""
    lines = [cut(line, LONGEST_VALUE) for line in text.strip("\n").split("\n")]
    frames = [at for at, line in enumerate(lines) if line.lstrip().startswith('File "')]
    last = frames[-1] if frames else len(lines)
    first = max(0, min(last, len(lines) - LAST_LINES))
    if first:
        yield "…"
    shown = lines[first:]
    if len(shown) <= 2 * LAST_LINES:
        yield from shown
        return
    yield from shown[:LAST_LINES]
    yield f"… {len(shown) - 2 * LAST_LINES} lines …"
    yield from shown[-LAST_LINES:]


def _sentence(opening: str, text: str) -> str:
    return f"{opening}{text}" if text else ""
