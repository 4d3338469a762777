"""The report for a person at a terminal: the verdict first, then what it rests on."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from io import StringIO
from itertools import chain, islice
from typing import Final, TypeVar

from rich.console import Console
from rich.text import Text

from distdiag.engine.aligner import DESELECTED, LIGHT, subjects
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import (
    Evidence,
    Finding,
    Location,
    Outcome,
    ReadFile,
    Report,
    Severity,
)
from distdiag.reports.base import Reporter, cut, one_line, short, visible

K = TypeVar("K", bound=Hashable)

LABEL_WIDTH: Final = 11
MOST_GROUPS: Final = 12
"""So many groups of ranks are shown one by one; report.json has the others."""
MOST_UNSEEN: Final = 6
LONGEST_CLAUSE: Final = 100
"""So many causes of what was not observed are shown, and so much of each: the rest is details."""
CODE: Final = re.compile(r"[A-Z]+\d*")
"""A check's code; other keys of `not_checked` are words for what a probe does not see."""
LONGEST_VALUE: Final = 200
MOST_FILES: Final = 4
"""More files of one kind in one folder are shown as one line."""
LAST_LINES: Final = 9
"""Four frames with their source, and the line of the exception."""
STYLES: Final = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold cyan",
}
ENDINGS: Final = {
    Outcome.RUNNING: "the run had not ended when this was written",
    Outcome.FINISHED: "the run finished",
    Outcome.FAILED: "the run failed",
    Outcome.HUNG: "the run hung",
    Outcome.ABORTED: "the run was aborted",
    Outcome.KILLED: "the run was killed",
}


class TerminalReporter(Reporter):
    """Write plain lines, or coloured ones, for a given width."""

    name = "terminal"

    def render(self, report: Report) -> str:
        """Return the whole report as lines."""
        labels = {info.rank: info.label for info in report.run.ranks if info.label}
        page = _Page(self.width, color=self.color, labels=labels)
        _write_verdict(page, report)
        for finding in sorted(report.findings, key=lambda finding: -finding.severity.weight):
            _write_finding(page, finding)
        _write_next_time(page, report)
        _write_files(page, report)
        if report.files or not _is_healthy(report):
            page.blank()
        _write_coverage(page, report, verbose=self.verbose)
        _write_ignored(page, report, verbose=self.verbose)
        if self.verbose:
            _write_gaps(page, report)
        if self.verbose or not _is_healthy(report):
            _write_run(page, report, verbose=self.verbose)
        return page.text()


class _Page:
    """Lines of text within a width. What is written is taken literally: no markup, no controls."""

    def __init__(self, width: int, *, color: bool, labels: Mapping[int, str]) -> None:
        self._width = width
        self._labels = labels
        self._file = StringIO()
        self._console = Console(
            file=self._file,
            width=width,
            force_terminal=color,
            force_jupyter=False,
            color_system="standard" if color else None,
            legacy_windows=False,
        )

    def who(self, ranks: RankSet) -> str:
        """Return ranks as a phrase, with the names of processes whose ranks are not known."""
        named = [self._labels[rank] for rank in ranks if rank in self._labels]
        known = RankSet(rank for rank in ranks if rank not in self._labels)
        more = f" and {len(named) - MOST_GROUPS} more" if len(named) > MOST_GROUPS else ""
        names = ", ".join([*([_phrase(known)] if known else []), *named[:MOST_GROUPS]])
        return f"{names}{more}" if named else _phrase(ranks)

    def blank(self) -> None:
        """Write an empty line."""
        self._file.write("\n")

    def write(self, text: str, *, indent: int = 2, first: str = "", style: str = "") -> None:
        """Write a paragraph; `first` stands in the indent of its first line."""
        lines = chain.from_iterable(self._wrapped(line, indent) for line in text.splitlines())
        for number, line in enumerate(lines):
            self._put(Text(visible(first)) if number == 0 else Text(), line, indent, style)

    def write_label(self, label: str, text: str) -> None:
        """Write a paragraph beside its label; nothing where there is no text."""
        self.write(text, indent=2 + LABEL_WIDTH, first=f"  {label}")

    def write_whole(self, text: str, *, indent: int) -> None:
        """Write one line that may be longer than the width: a path must stay in one piece."""
        self._put(Text(), Text(visible(text)), indent, "")

    def text(self) -> str:
        """Return all that was written."""
        return self._file.getvalue()

    def _wrapped(self, line: str, indent: int) -> Iterable[Text]:
        return Text(visible(line.strip())).wrap(self._console, max(self._width - indent, 20))

    def _put(self, first: Text, line: Text, indent: int, style: str) -> None:
        first.stylize("bold")
        first.pad_right(indent - first.cell_len)
        line.rstrip()
        line.stylize(style)
        self._console.print(first + line, soft_wrap=True, highlight=False)


def _write_verdict(page: _Page, report: Report) -> None:
    if silent := report.silent_ranks:
        verb, them = ("was", "it") if len(silent) == 1 else ("were", "them")
        unseen = f"{_phrase(silent)} of {report.run.world_size} {verb} not observed"
        page.write(f"distdiag: {unseen}: nothing below is about {them}.", indent=0, style="bold")
    counts = [
        _count(number, severity if severity is not Severity.INFO else "note")
        for severity in Severity
        if (number := sum(finding.severity is severity for finding in report.findings))
    ]
    found = ", ".join(counts)
    if not report.findings:
        found = "nothing found" if report.checked else "nothing was checked"
    is_open = report.run.outcome is Outcome.RUNNING and report.files
    ending = "no file says how the run ended" if is_open else ENDINGS[report.run.outcome]
    page.write(f"distdiag: {found}; {ending}.", indent=0, style="bold")
    if not report.complete and report.run.outcome is not Outcome.RUNNING:
        page.write("This report is provisional: the reporter was ended early.", indent=0)


def _write_finding(page: _Page, finding: Finding) -> None:
    page.blank()
    head = f"{finding.severity.upper()} {finding.code} {finding.name}"
    page.write(head, indent=0, style=STYLES[finding.severity])
    page.write(finding.message)
    _write_location(page, finding.location, indent=2)
    page.write_label("culprit", page.who(finding.ranks) if finding.ranks else "not known")
    page.write_label("certainty", f"{finding.grade} ({finding.confidence:.0%})")
    if finding.step is not None:
        page.write_label("step", str(finding.step))
    page.write_label("subjects", ", ".join(finding.subjects))
    for ranks, entries in _grouped(finding, page.who):
        _write_evidence(page, ranks, entries)
    page.write_label("why", finding.why)
    page.write_label("fix", finding.fix)
    page.write_label("", _sentence("The fix also changes: ", finding.fix_changes))
    page.write_label("", _sentence("The fix leaves: ", finding.fix_leaves))
    page.write_label("wrong if", finding.disproof)


def _write_location(page: _Page, location: Location | None, *, indent: int) -> None:
    if location is None:
        return
    page.write_whole(f"{location} in {location.function}", indent=indent)
    if location.source:
        source = cut(visible(location.source.strip()), LONGEST_VALUE)
        page.write_whole(source, indent=indent + 4)


def _write_evidence(page: _Page, ranks: str, entries: Iterable[Evidence]) -> None:
    page.write_label("evidence", ranks)
    for entry in entries:
        page.write(entry.summary, indent=6)
        _write_location(page, entry.location, indent=6)
        values = (_end_of(f"{key} = {value}") for key, value in entry.values.items())
        page.write(", ".join(values), indent=6)


def _end_of(value: str) -> str:
    """Return a value; of one with many lines, such as a traceback, what matters is the end."""
    first, *rest = value.split("\n")
    lines = [cut(line, LONGEST_VALUE) for line in (first, *rest[-LAST_LINES:])]
    if len(rest) > LAST_LINES:
        lines.insert(1, "…")
    return "\n".join(lines)


def _grouped(
    finding: Finding, who: Callable[[RankSet], str]
) -> Iterator[tuple[str, list[Evidence]]]:
    """Yield what is said of the same ranks together, and once what is said of many ranks alike."""
    alike = _ranks_by_key(
        ((entry.summary, entry.location, tuple(entry.values.items())), entry.ranks)
        for entry in finding.evidence
    )
    by_ranks: dict[RankSet, list[Evidence]] = {}
    for (summary, location, values), ranks in alike.items():
        entry = Evidence(ranks=ranks, summary=summary, location=location, values=dict(values))
        by_ranks.setdefault(ranks, []).append(entry)
    if len(by_ranks) > MOST_GROUPS:
        # The culprits and the large groups must be among those that are shown.
        order = sorted(by_ranks, key=lambda r: (r.isdisjoint(finding.ranks), -len(r)))
        by_ranks = {ranks: by_ranks[ranks] for ranks in order}
    for ranks, entries in islice(by_ranks.items(), MOST_GROUPS):
        yield who(ranks) if ranks else "rank not known", entries
    if len(by_ranks) > MOST_GROUPS:
        rest = _count(len(by_ranks) - MOST_GROUPS, "more group")
        yield f"and {rest} of ranks: see report.json", []


def _ranks_by_key(pairs: Iterable[tuple[K, Iterable[int]]]) -> dict[K, RankSet]:
    found: dict[K, list[int]] = {}
    for key, ranks in pairs:
        found.setdefault(key, []).extend(ranks)
    return {key: RankSet(ranks) for key, ranks in found.items()}


def _is_healthy(report: Report) -> bool:
    is_whole = report.complete and not report.silent_ranks
    return is_whole and not report.findings and report.run.outcome is Outcome.FINISHED


def _write_coverage(page: _Page, report: Report, *, verbose: bool) -> None:
    """Write in one paragraph what looked, what the run has none of, and what was not observed."""
    known = subjects()
    reasons = _codes_by_reason(report)
    meant = {each.reason: reasons.pop(each.reason, []) for each in (LIGHT, DESELECTED)}
    absent = {known[reason]: None for reason in reasons if reason in known}
    unseen = [f"{_phrase(report.silent_ranks)}"] if report.silent_ranks else []
    unseen += {
        _short_of(reason, codes): None for reason, codes in reasons.items() if reason not in known
    }
    parts = [f"{_count(len(report.checked), 'check')} looked"]
    if absent:
        parts.append(f"not present in this run: {', '.join(absent)}")
    parts += [
        f"{_count(len(codes), 'check')}: {reason}" for reason, codes in meant.items() if codes
    ]
    if unseen:
        shown = ", ".join(unseen[:MOST_UNSEEN])
        more = f" and {len(unseen) - MOST_UNSEEN} more" if len(unseen) > MOST_UNSEEN else ""
        parts.append(f"not observed: {shown}{more}")
    hint = " --verbose says why." if report.not_checked and not verbose else ""
    page.write(f"{'; '.join(parts)}.{hint}", indent=0)


def _short_of(reason: str, codes: Iterable[str]) -> str:
    """Return what was not observed: what a probe says that it does not see, or the first clause."""
    seen = [code for code in codes if not CODE.fullmatch(code)]
    return ", ".join(seen) or cut(re.split("[:;] ", reason)[0], LONGEST_CLAUSE)


def _codes_by_reason(report: Report) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for code, reason in report.not_checked.items():
        found.setdefault(reason, []).append(code)
    return found


def _write_ignored(page: _Page, report: Report, *, verbose: bool) -> None:
    """Write how many findings do not count, and with `verbose` which, by what, and why."""
    counts = report.counts
    ways = ((counts.ignored, "ignored"), (counts.baselined, "known by the baseline"))
    known = ", ".join(f"{_count(number, 'finding')} {way}" for number, way in ways if number)
    if known:
        page.write(f"{known}.{'' if verbose else ' --verbose lists them.'}", indent=0)
    for each in report.ignored if verbose else ():
        reason = _sentence(": ", each.reason)
        page.write(f"{one_line(each.finding).removeprefix('distdiag: ')}")
        page.write(f"ignored by {each.by}{reason}", indent=6)


def _write_gaps(page: _Page, report: Report) -> None:
    if not (report.not_checked or report.silent_ranks):
        return
    page.blank()
    page.write("Not looked at", indent=0, style="bold")
    if report.silent_ranks:
        page.write(f"{_phrase(report.silent_ranks)}: silent, no events were read")
    for reason, codes in _codes_by_reason(report).items():
        page.write(f"{', '.join(codes)}: {reason}")


def _write_next_time(page: _Page, report: Report) -> None:
    if not report.next_time:
        return
    page.blank()
    page.write("What to collect next time", indent=0, style="bold")
    for sentence in report.next_time:
        page.write(sentence, indent=4, first="  -")


def _write_files(page: _Page, report: Report) -> None:
    """Write what was read, files of one kind in one folder together where they are many."""
    if not report.files:
        return
    page.blank()
    page.write("What was read", indent=0, style="bold")
    alike: dict[tuple[object, ...], list[ReadFile]] = {}
    for file in report.files:
        key = (file.path.rpartition("/")[0], file.kinds, bool(file.num_lines), file.problem)
        alike.setdefault(key, []).append(file)
    for files in islice(alike.values(), MOST_GROUPS):
        several = len(files) > MOST_FILES
        for group in [files] if several else [[file] for file in files]:
            more = f" and {len(group) - 1} more" if several else ""
            page.write_whole(f"{group[0].path}{more}", indent=2)
            page.write(_what_was_read(group, page.who), indent=6)
    if len(alike) > MOST_GROUPS:
        page.write(f"and {_count(len(alike) - MOST_GROUPS, 'more kind')}: see report.json")


def _what_was_read(files: list[ReadFile], who: Callable[[RankSet], str]) -> str:
    """Return ``log of ranks 0-3: 16 of 5,000 lines understood; only its end was read``."""
    first = files[0]
    ranks = RankSet(rank for file in files for rank in file.ranks)
    whose = f" of {who(ranks)}" if ranks else ""
    understood = sum(file.num_understood for file in files)
    num_lines = sum(file.num_lines for file in files)
    how_much = f": {understood:,} of {num_lines:,} lines understood" if num_lines else ""
    if understood and not num_lines:
        how_much = f": {understood:,} entries understood"
    what = f"{' and '.join(first.kinds)}{whose}{how_much}" if first.kinds else ""
    return "; ".join(filter(None, [what, first.problem]))


def _write_run(page: _Page, report: Report, *, verbose: bool) -> None:
    run = report.run
    page.blank()
    page.write("The run", indent=0, style="bold")
    page.write_label("command", " ".join(run.command))
    if report.files:  # of a post-mortem: what no file says is left out
        page.write_label("ranks", f"{run.world_size}{_sentence(', torch ', run.torch)}")
    else:
        page.write_label("ranks", f"{run.world_size}, torch {run.torch or 'not loaded'}")
        page.write_label("time", f"{run.started} to {run.ended or '(not ended)'}")
    page.write_label("attempts", str(run.attempts) if run.attempts > 1 else "")
    page.write_label("active", ", ".join(run.active_modes))
    page.write_label("dumps by", run.dump_transport)
    if verbose:
        page.write_label("checked", ", ".join(report.checked) or "nothing")
    statuses = _ranks_by_key(((info.fate, info.last), (info.rank,)) for info in run.ranks)
    for (status, last), ranks in islice(statuses.items(), MOST_GROUPS):
        page.write(f"{page.who(ranks)}: {status}{_sentence('; last: ', last)}")
    if len(statuses) > MOST_GROUPS:
        page.write(
            f"and {_count(len(statuses) - MOST_GROUPS, 'more group')} of ranks: see report.json"
        )


def _phrase(ranks: RankSet) -> str:
    return f"rank {ranks}" if len(ranks) == 1 else f"ranks {short(ranks)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _sentence(opening: str, text: str) -> str:
    return f"{opening}{text}" if text else ""
