"""What a report says in words, whichever form shows it: the verdict, places, evidence, coverage."""

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from distdiag.engine.aligner import DESELECTED, LIGHT, subjects
from distdiag.events.base import Value
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Outcome, Report, Severity
from distdiag.reports.base import cut, short

K = TypeVar("K", bound=Hashable)

LONGEST_HEADLINE: Final = 90
"""A verdict names what was found in so many characters; the finding says all of it."""
LONGEST_CLAUSE: Final = 100
CODE: Final = re.compile(r"[A-Z]+\d*")
"""A check's code; other keys of `not_checked` are words for what a probe does not see."""
ENDINGS: Final = {
    Outcome.RUNNING: "the run had not ended when this was written",
    Outcome.FINISHED: "the run finished",
    Outcome.FAILED: "the run failed",
    Outcome.HUNG: "the run hung",
    Outcome.ABORTED: "the run was aborted",
    Outcome.KILLED: "the run was killed",
}

_PACKAGES: Final = ("/site-packages/", "/dist-packages/")
_DIGEST: Final = re.compile(r"(?:0x)?[0-9a-f]{16,}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a report comes to in one sentence.

    `level` is ``ok``, ``note``, ``warning``, ``error``, or ``unknown`` where nothing was found in a
    run that did not end well, or of which not all is known.
    """

    level: str
    text: str


def verdict(report: Report) -> Verdict:
    """Say in one sentence what was found, the worst of it first, and how the run ended."""
    ending = ending_of(report)
    if not report.findings:
        return _nothing_found(report, ending)
    worst = by_severity(report.findings)[0]
    level = "note" if worst.severity is Severity.INFO else str(worst.severity)
    text = f"{counts(report.findings)}: {headline(worst)}"
    finished = report.run.outcome is Outcome.FINISHED and level != "note"
    return Verdict(level, text if finished else f"{text}; {ending}")


def _nothing_found(report: Report, ending: str) -> Verdict:
    looked = f"{count(len(report.checked), 'check')} looked"
    if not report.checked:
        return Verdict("unknown", f"nothing was checked; {ending}")
    if is_healthy(report):
        return Verdict("ok", f"OK: {looked}, nothing found; {ending}")
    return Verdict("unknown", f"{looked}, nothing found; {ending}")


def is_healthy(report: Report) -> bool:
    """Say whether the whole run was seen, ended well, and nothing was found in it."""
    is_whole = report.complete and not report.silent_ranks
    return is_whole and not report.findings and report.run.outcome is Outcome.FINISHED


def ending_of(report: Report) -> str:
    """Say how the run ended, as far as that is known."""
    is_open = report.run.outcome is Outcome.RUNNING and report.files
    return "no file says how the run ended" if is_open else ENDINGS[report.run.outcome]


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, the worst first; equal ones keep their order."""
    return sorted(findings, key=lambda finding: -finding.severity.weight)


def counts(findings: Sequence[Finding]) -> str:
    """Return ``1 error, 2 warnings``."""
    found = [
        count(number, severity_word(severity))
        for severity in Severity
        if (number := sum(finding.severity is severity for finding in findings))
    ]
    return ", ".join(found)


def severity_word(severity: Severity) -> str:
    """Return what a person calls it: a finding of severity info is a note."""
    return "note" if severity is Severity.INFO else str(severity)


def headline(finding: Finding) -> str:
    """Return what was found without its details, and the code: ``… left the loop (COL011)``."""
    first = re.split(r"(?:: |; | \()", " ".join(finding.message.split()))[0]
    return f"{cut(first, LONGEST_HEADLINE)} ({finding.code})"


def silence(report: Report) -> str:
    """Say which ranks nothing is known of; empty if there are none."""
    silent = report.silent_ranks
    if not silent:
        return ""
    verb, them = ("was", "it") if len(silent) == 1 else ("were", "them")
    unseen = f"{phrase(silent)} of {report.run.world_size} {verb} not observed"
    return f"{unseen}: nothing below is about {them}."


def coverage(report: Report, most: int = 6) -> str:
    """Say in one sentence how many checks looked, what the run has none of, what was not seen."""
    known = subjects()
    reasons = codes_by_reason(report)
    meant = {each.reason: reasons.pop(each.reason, []) for each in (LIGHT, DESELECTED)}
    absent = {known[reason]: None for reason in reasons if reason in known}
    unseen = [f"{phrase(report.silent_ranks)}"] if report.silent_ranks else []
    unseen += {
        _short_of(reason, codes): None for reason, codes in reasons.items() if reason not in known
    }
    parts = [f"{count(len(report.checked), 'check')} looked"]
    if absent:
        parts.append(f"not present in this run: {', '.join(absent)}")
    parts += [f"{count(len(codes), 'check')}: {reason}" for reason, codes in meant.items() if codes]
    if unseen:
        shown = ", ".join(unseen[:most])
        more = f" and {len(unseen) - most} more" if len(unseen) > most else ""
        parts.append(f"not observed: {shown}{more}")
    return f"{'; '.join(parts)}."


def _short_of(reason: str, codes: Iterable[str]) -> str:
    """Return what was not observed: what a probe says that it does not see, or the first clause."""
    seen = [code for code in codes if not CODE.fullmatch(code)]
    return ", ".join(seen) or cut(re.split("[:;] ", reason)[0], LONGEST_CLAUSE)


def codes_by_reason(report: Report) -> dict[str, list[str]]:
    """Return which checks did not look, by the reason."""
    found: dict[str, list[str]] = {}
    for code, reason in report.not_checked.items():
        found.setdefault(reason, []).append(code)
    return found


def grouped(finding: Finding) -> Iterator[tuple[RankSet, list[Evidence]]]:
    """Yield what is said of the same ranks together, and once what is said of many ranks alike.

    The culprits and the large groups come first where there are many.
    """
    alike = ranks_by_key(
        ((entry.summary, entry.location, tuple(entry.values.items())), entry.ranks)
        for entry in finding.evidence
    )
    by_ranks: dict[RankSet, list[Evidence]] = {}
    for (summary, location, values), ranks in alike.items():
        entry = Evidence(ranks=ranks, summary=summary, location=location, values=dict(values))
        by_ranks.setdefault(ranks, []).append(entry)
    yield from by_ranks.items()


def ranks_by_key(pairs: Iterable[tuple[K, Iterable[int]]]) -> dict[K, RankSet]:
    """Put the ranks of equal keys together."""
    found: dict[K, list[int]] = {}
    for key, ranks in pairs:
        found.setdefault(key, []).extend(ranks)
    return {key: RankSet(ranks) for key, ranks in found.items()}


def is_digest(value: Value) -> bool:
    """Say whether a value is a digest: it tells a reader nothing but that it differs."""
    return isinstance(value, str) and bool(_DIGEST.fullmatch(value))


def shown_path(path: str, folder: str | None = None) -> str:
    """Return a path as a reader knows it: below the working directory, or within a package."""
    here = os.getcwd() if folder is None else folder
    package = max(path.rfind(name) for name in _PACKAGES)
    if package > 0:
        return f"…{path[package:]}"
    is_below = path.startswith(f"{here}/") and here != "/"
    return path[len(here) + 1 :] if is_below else path


def phrase(ranks: RankSet) -> str:
    """Return ``rank 3`` or ``ranks 0-3,7``, shortened where they are too many."""
    return f"rank {ranks}" if len(ranks) == 1 else f"ranks {short(ranks)}"


def count(number: int, word: str) -> str:
    """Return ``1 check`` or ``3 checks``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
