"""What became of a test, from what became of it on each of its ranks."""

from __future__ import annotations

import signal
from collections.abc import Hashable, Iterable, Iterator, Mapping
from io import StringIO
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import pytest
from _pytest._code.code import ReprEntryNative, ReprFileLocation, ReprTraceback, TerminalRepr
from _pytest._io import TerminalWriter

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Severity
from distdiag.reports import load_reporter, one_line
from distdiag.testing.processes import PEERS_S
from distdiag.testing.run import START_S, Ended

# How a test that failed on some of its ranks is shown.


class Part(NamedTuple):
    """One piece of a failure under its title; `body` is text or what pytest can draw."""

    title: str
    body: Any


class RankFailures(TerminalRepr):
    """What pytest keeps as the `longrepr` of a failed test: one part below the other."""

    def __init__(self, summary: str, parts: tuple[Part, ...], *, path: str, line: int) -> None:
        """Keep the parts; `summary` is the one line for pytest's short summary and for JUnit."""
        self.parts = parts
        self.reprcrash = ReprFileLocation(path, line, summary)
        self.sections: list[tuple[str, str, str]] = []

    @property
    def reprtraceback(self) -> ReprTraceback:
        """The same as text in the form that pytest-xdist passes on, which keeps `reprcrash`."""
        return ReprTraceback([ReprEntryNative([f"{self}\n"])], extraline=None, style="native")

    def toterminal(self, writer: TerminalWriter) -> None:
        """Draw all parts."""
        for part in self.parts:
            if part.title:
                writer.sep("_", part.title)
            if hasattr(part.body, "toterminal"):
                part.body.toterminal(writer)
            else:
                writer.line(str(part.body).rstrip("\n"))

    def __str__(self) -> str:
        """Return the same as text, for reports in files and for other processes."""
        text = StringIO()
        writer = TerminalWriter(text)
        writer.hasmarkup = False
        self.toterminal(writer)
        return text.getvalue().strip()


# The outcome of a test, from those of its ranks.

K = TypeVar("K", bound=Hashable)

CAUSED_BY_END: Final = frozenset({"HNG001", "HNG002"})
"""A rank that raised or is gone: the test itself says so, or ended the rank."""
STANDING_STILL: Final = frozenset({"COL001", *(f"HNG{number:03}" for number in range(3, 18))})
"""What a rank is said to be stuck in. Where all ranks came to the end, it was only slow."""
LONGEST_OUTPUT: Final = 20_000
"""Of what a rank wrote, so many characters are shown, the last ones."""

NUM_LAST_LINES: Final = 8

_FATAL: Final = "Fatal Python error: "
_ABOUT_RUN: Final = "\nThe run\n"
"""What comes behind this in the text of a report says little about a test."""
_FAILING: Final = {"error": Severity.ERROR.weight, "warning": Severity.WARNING.weight}


class Outcome(NamedTuple):
    """The result of a test on its ranks.

    `by_ranks` says whether the ranks' own reports decided, marks such as xfail included; else it
    was the observation, or the way in which a rank ended.
    """

    kind: Literal["passed", "failed", "skipped", "xfailed"]
    by_ranks: bool = True
    skip: tuple[str, int, str] | None = None
    wasxfail: str | None = None
    failures: RankFailures | None = None


def outcome_of(ended: Ended, item: pytest.Function) -> Outcome:
    """Return what became of a test."""
    reports = {rank: _reports(item, ended, rank) for rank in range(ended.world_size)}
    failed = {rank: [r for r in phases if r.failed] for rank, phases in reports.items()}
    problems = [*_problems(ended), *_deaths(ended)]
    findings = _failing_findings(ended)
    if problems or findings or any(failed.values()):
        tracebacks = [*_tracebacks(failed, ended)]
        parts = (*problems, *tracebacks, *_left_running(ended), *_observed(ended, findings))
        summary = _summary(ended, problems, failed, findings)
        path, line = _place(ended, problems, failed, item)
        failures = RankFailures(summary, parts, path=path, line=line)
        return Outcome("failed", by_ranks=any(failed.values()), failures=failures)
    return _without_failure([report for phases in reports.values() for report in phases], ended)


def _reports(item: pytest.Function, ended: Ended, rank: int) -> list[pytest.TestReport]:
    result = ended.results[rank]
    forms = result.reports if result else ()
    hook = item.config.hook.pytest_report_from_serializable
    return [report for form in forms if (report := hook(config=item.config, data={**form}))]


def _without_failure(reports: list[pytest.TestReport], ended: Ended) -> Outcome:
    xfails = [str(r.wasxfail) for r in reports if r.skipped and hasattr(r, "wasxfail")]
    if xfails:
        return Outcome("xfailed", wasxfail=xfails[0])
    skips = [report for report in reports if report.skipped]
    if len(skips) == ended.world_size:
        return Outcome("skipped", skip=_skip(skips[0]))
    xpasses = [str(r.wasxfail) for r in reports if r.passed and hasattr(r, "wasxfail")]
    return Outcome("passed", wasxfail=xpasses[0] if xpasses else None)


def _skip(report: pytest.TestReport) -> tuple[str, int, str]:
    given: Any = report.longrepr
    file, line, reason = given if isinstance(given, list | tuple) else ("", 0, str(given))
    return str(file), int(line), str(reason)


def _problems(ended: Ended) -> Iterator[Part]:
    if ended.stacks is not None:
        late = f"{RankSet(ended.stacks.ranks).phrase()} of {ended.world_size}"
        what = f"had not ended after {ended.mark.timeout:g} s"
        if not ended.has_begun:
            what = f"had not met in a process group after {START_S:g} s"
        yield Part(f"{late} {what}", ended.stacks.text)
    results = ended.results.items()
    by_rank = {rank: result.problem for rank, result in results if result and result.problem}
    for problem, group in _groups(by_rank):
        yield Part(f"the test could not run on {group.phrase()}", problem)


def _deaths(ended: Ended) -> Iterator[Part]:
    """Name ranks that ended otherwise than their own reports say."""
    by_rank = {}
    for rank, status in ended.statuses.items():
        result = ended.results[rank]
        has_said = result is not None and (result.problem or _has_all(result.reports))
        if status < 0:
            by_rank[rank] = f"killed by {_signal_name(-status)}"
        elif not has_said:
            by_rank[rank] = f"ended with status {status} before the test was over"
    for what, group in _groups(by_rank):
        yield Part(f"{group.phrase()}: {what}", _last_words(ended.outputs[min(group)]))


def _left_running(ended: Ended) -> Iterator[Part]:
    ranks = RankSet(ended.stopped)
    if ranks and ended.stacks is None:
        yield Part("", f"{ranks.phrase()} still ran {PEERS_S:g} s after that, and had to be ended")


def _last_words(output: str) -> str:
    """Return where Python was when it was killed, if it could say so, or the last lines."""
    _, fatal, stacks = output.rpartition(_FATAL)
    if fatal:
        return "\n".join([fatal + stacks.partition("\n")[0], *_current_thread(stacks)])
    return "\n".join(output.splitlines()[-NUM_LAST_LINES:]) or "(it wrote nothing)"


def _current_thread(stacks: str) -> list[str]:
    return stacks[max(stacks.find("Current thread"), 0) :].splitlines()[:NUM_LAST_LINES]


def _has_all(reports: Iterable[Mapping[str, Any]]) -> bool:
    return any(report.get("when") == "teardown" for report in reports)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tracebacks(failed: Mapping[int, list[pytest.TestReport]], ended: Ended) -> Iterator[Part]:
    """Yield each distinct traceback once, with the ranks that have it."""
    by_text: dict[tuple[str, str], list[int]] = {}
    drawn: dict[tuple[str, str], Any] = {}
    for rank in _first_to_raise(failed, ended):
        for report in failed[rank]:
            key = (str(report.when), report.longreprtext)
            by_text.setdefault(key, []).append(rank)
            drawn.setdefault(key, report.longrepr)
    for key, ranks in by_text.items():
        phase = "" if key[0] == "call" else f", {key[0]}"
        yield Part(f"{RankSet(ranks).phrase()} of {ended.world_size}{phase}", drawn[key])


def _first_to_raise(failed: Iterable[int], ended: Ended) -> list[int]:
    """Return the ranks, those first whose exception made the others fail."""
    findings = ended.report.findings if ended.report is not None else ()
    first = {rank for f in findings if f.code == "HNG001" for rank in f.ranks}
    return sorted(failed, key=lambda rank: (rank not in first, rank))


def _failing_findings(ended: Ended) -> list[Finding]:
    least = _FAILING.get(ended.mark.fail_on)
    if least is None and ended.stacks is None:
        return []
    least = Severity.WARNING.weight if least is None or ended.stacks is not None else least
    return [f for f in _findings(ended) if f.severity.weight >= least]


def _findings(ended: Ended) -> tuple[Finding, ...]:
    """Return what the observation found, without what the end of the test itself has caused."""
    if ended.early is not None:
        return ended.early.findings
    found = ended.report.findings if ended.report is not None else ()
    kept = tuple(f for f in found if not (ended.stopped and f.code == "HNG002"))
    if ended.went_well:
        kept = tuple(f for f in kept if f.code not in STANDING_STILL)
    if ended.stacks is not None and not any(f.severity.weight for f in kept):
        return ended.stacks.report.findings if ended.stacks.report is not None else ()
    return kept


def _observed(ended: Ended, findings: list[Finding]) -> Iterator[Part]:
    report = ended.report
    is_reported = any(ended.results.values()) and ended.stacks is None
    shown = tuple(f for f in findings if not (is_reported and f.code in CAUSED_BY_END))
    if report is None:
        yield Part("distdiag", "the ranks were not observed: there is no report of them")
    elif shown:
        # That it was ended early is this process's doing.
        about = msgspec.structs.replace(report, findings=shown, complete=True)
        text = load_reporter("terminal")().render(about)
        yield Part("distdiag", text.partition(_ABOUT_RUN)[0])
    elif ended.stacks is not None:
        yield Part("distdiag", f"no check found a reason; checked: {', '.join(report.checked)}")


# What stands in one line, and where in the test it is.


def _summary(
    ended: Ended,
    problems: list[Part],
    failed: Mapping[int, list[pytest.TestReport]],
    findings: list[Finding],
) -> str:
    shown = [one_line(f).removeprefix("distdiag: ") for f in findings]
    if problems:
        return "; ".join([problems[0].title, *shown[:1]])
    for rank in _first_to_raise(failed, ended):
        for report in failed[rank]:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else report.longreprtext
            return f"rank {rank}: {message}"
    return shown[0]


def _place(
    ended: Ended,
    problems: list[Part],
    failed: Mapping[int, list[pytest.TestReport]],
    item: pytest.Function,
) -> tuple[str, int]:
    """Return the file and line that the summary speaks of; those of the test if of no line."""
    if not problems:
        for rank in _first_to_raise(failed, ended):
            for report in failed[rank]:
                crash = getattr(report.longrepr, "reprcrash", None)
                if crash is not None:
                    return str(crash.path), int(crash.lineno)
    path, line, _ = item.reportinfo()
    return str(path), (line or 0) + 1


def _groups(by_rank: Mapping[int, K]) -> Iterator[tuple[K, RankSet]]:
    groups: dict[K, list[int]] = {}
    for rank, what in by_rank.items():
        groups.setdefault(what, []).append(rank)
    for what, ranks in groups.items():
        yield what, RankSet(ranks)


def output_sections(ended: Ended) -> Iterator[tuple[str, str]]:
    """Yield what the ranks wrote, equal texts once."""
    for text, ranks in _groups({rank: text for rank, text in ended.outputs.items() if text}):
        cut = len(text) - LONGEST_OUTPUT
        shown = text if cut <= 0 else f"({cut} characters before this)\n{text[cut:]}"
        yield f"output of {ranks.phrase()}", shown
