"""What a run adds to a case: its findings, what was changed for it, and what that tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distdiag.case.notebook import OPEN, Entry, entries_of, item, one_line_of, with_entry
from distdiag.comparison import Difference, compare, facts_of
from distdiag.comparison.differences import CORE_VERSION, class_of
from distdiag.comparison.facts import ARGUMENT
from distdiag.comparison.text import title_of
from distdiag.events.environment import FactKind
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Finding, Outcome, Report, Severity
from distdiag.findings.fingerprint import fingerprint_of
from distdiag.reports import one_line, read_report
from distdiag.reports.words import by_severity, verdict

FAILED: Final = "failed"
WORKED: Final = "worked"
UNCLEAR: Final = "unclear"
RESULTS: Final = (WORKED, FAILED, UNCLEAR)
_SAID: Final = {
    WORKED: "worked",
    FAILED: "failed: what it is for is found again",
    UNCLEAR: "is not judged: the run did not end well, or its check did not look",
}
MOST_FAILED: Final = 3
"""After so many fixes that failed, the picture of the fault is wrong, not the next fix."""
MOST_DIFF: Final = 60
"""So many lines of a diff are kept: an experiment with one change needs fewer."""

_CHANGED: Final = (
    ARGUMENT,
    FactKind.LAUNCH,
    FactKind.CODE,
    CORE_VERSION,
    FactKind.VERSION,
    FactKind.VARIABLE,
)
"""What somebody changes; plans, data, weights and outcomes follow from it."""
_FOLLOWING: Final = (FactKind.SEED, FactKind.SETTING)
"""What arguments and code set, as a rule; without a change of those it is one by itself."""
_WITH_TORCH: Final = frozenset({"CUDA of torch", "NCCL", "cuDNN"})


@dataclass(frozen=True, slots=True)
class Trial:
    """A run that is added to a notebook; it `tries` the fix of a hypothesis, if it names one."""

    run: Path
    tries: str = ""
    result: str = ""


def changed(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return what somebody changed, of all that differs between two runs, each change once."""
    by_class = [(class_of(each), each) for each in differences]
    found = [each for kind, each in by_class if kind in _CHANGED]
    if not found:
        return tuple(each for kind, each in by_class if kind in _FOLLOWING)
    code = [each for each in found if each.kind == FactKind.CODE]
    # The text of the script, the commit and the changes since then are views of one edit.
    edit = max(code, key=lambda each: len(each.details), default=None)
    has_torch = any(each.name == "torch" for each in found)
    return tuple(
        each
        for each in found
        if (each.kind != FactKind.CODE or each is edit)
        and not (has_torch and each.name in _WITH_TORCH)
    )


def with_trial(text: str, trial: Trial) -> tuple[str, list[str]]:
    """Return the notebook with a run and the hypotheses that it suggests, and what to point out.

    Raises:
        UsageError: there is no run, no such hypothesis, or nobody says what came of it.

    """
    report = read_report(trial.run)
    hypothesis = _named(entries_of(text, "H"), trial.tries) if trial.tries else None
    result = trial.result or (_result_of(hypothesis, report) if hypothesis else "")
    changes, problem = _changes(text, trial.run)
    body = [item("run", str(trial.run)), item("verdict", verdict(report).text)]
    remarks = []
    if hypothesis is not None:
        body += [item("tries", hypothesis.name), item("result", result)]
        remarks = [f"the fix for {hypothesis.name} {_SAID[result]}"]
    failed = _failed_since_review(text) if result == FAILED else []
    if len(failed) + 1 >= MOST_FAILED:
        body.append(item("reviewed by", OPEN))
        remarks.append(
            f"{len(failed) + 1} fixes in a row have failed ({', '.join(failed)} and this one): let "
            "somebody else look at symptom and hypotheses before the next one, and write who did "
            "at `reviewed by`"
        )
    body += [*_changed_lines(changes, problem), *_found_lines(report)]
    text, name = with_entry(text, "E", trial.run.name, body)
    if changes is not None and len(changes) > 1:
        names = ", ".join(title_of(each) for each in changes)
        remarks.append(
            f"{name} changes {len(changes)} things at once ({names}): which of them did what it "
            "shows is not known; run it again with one of them"
        )
    return _with_suggestions(text, report), remarks


def _named(entries: Sequence[Entry], name: str) -> Entry:
    found = next((entry for entry in entries if entry.name == name), None)
    if found is None:
        names = ", ".join(entry.name for entry in entries) or "none"
        raise UsageError(f"no hypothesis is called {name} (there are: {names})")
    return found


def _result_of(hypothesis: Entry, report: Report) -> str:
    """Say what came of a fix, by whether the finding that it is for is there again."""
    code = hypothesis.says("finding").partition(" ")[0]
    if not code:
        raise UsageError(f"{hypothesis.name} rests on no finding: say --result {'|'.join(RESULTS)}")
    if any(finding.code == code for finding in report.findings):
        return FAILED
    has_looked = code in report.checked and report.run.outcome is Outcome.FINISHED
    return WORKED if has_looked else UNCLEAR


def _changes(text: str, run: Path) -> tuple[tuple[Difference, ...] | None, str]:
    """Return what was changed since the run before; None, and why, where that is not known."""
    before = entries_of(text, "E")
    if not before:
        return None, "this is the first run"
    try:
        earlier = facts_of(Path(before[-1].says("run")))
        return changed(compare(earlier, facts_of(run))), ""
    except (UsageError, DamagedFileError) as error:
        return None, f"not compared: {error}"


def _changed_lines(changes: Sequence[Difference] | None, problem: str) -> Iterator[str]:
    if changes is None:
        yield item("changed", problem)
        return
    yield item("changed", ", ".join(map(title_of, changes)) or "nothing that is recorded")
    for each in changes:
        if each.kind != FactKind.CODE:
            yield f"  - {title_of(each)}: {one_line_of(f'{each.before} -> {each.after}')}"
    if len(changes) > 1:
        yield item("not known", "which of these changes did what this run shows")
    for each in changes:
        if each.details:
            left_out = len(each.details) - MOST_DIFF
            more = [f"... and {left_out} more lines"] if left_out > 0 else []
            yield from ("", "```diff", *map(one_line_of, each.details[:MOST_DIFF]), *more, "```")


def _found_lines(report: Report) -> Iterator[str]:
    yield ""
    for finding in by_severity(report.findings):
        yield f"- {one_line_of(one_line(finding).removeprefix('distdiag: '))}"
    if not report.findings:
        yield f"- {len(report.checked)} checks looked and found nothing"


def _failed_since_review(text: str) -> list[str]:
    """Return the experiments whose fixes failed since one worked, or somebody else looked."""
    failed: list[str] = []
    for entry in entries_of(text, "E"):
        if entry.says("result") == FAILED:
            failed.append(entry.name)
        if entry.says("reviewed by") or entry.says("result") == WORKED:
            failed.clear()
    return failed


def _with_suggestions(text: str, report: Report) -> str:
    """Return the notebook with a hypothesis for each finding that has none, the surest first."""
    known = {entry.says("finding") for entry in entries_of(text, "H")}
    serious = [each for each in report.findings if each.severity is not Severity.INFO]
    for finding in sorted(serious, key=lambda f: (-f.severity.weight, -f.confidence)):
        about = f"{finding.code} {finding.fingerprint or fingerprint_of(finding)}"
        if about not in known:
            known.add(about)
            text, _ = with_entry(text, "H", finding.message, _suggestion(finding, about))
    return text


def _suggestion(finding: Finding, about: str) -> Iterator[str]:
    yield item("finding", about)
    confirmed = f"{finding.code} is gone in a run that differs by this alone: {finding.fix}"
    yield item("confirmed if", confirmed)
    yield item("refuted if", finding.disproof or f"the symptom stays when {finding.code} is gone")
