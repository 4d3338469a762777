"""What a report says in words, whichever form shows it: the verdict, places, evidence, coverage."""

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from distdiag.engine.aligner import DESELECTED, LIGHT, subjects
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Outcome, Report, Severity
from distdiag.reports.base import cut, phrase

K = TypeVar("K", bound=Hashable)

LONGEST_HEADLINE: Final = 160
"""A verdict names what was found in so many characters, two lines of a narrow terminal."""
SHORT_HEADLINE: Final = 40
"""A clause that is shorter says too little by itself: ``all ranks raised RuntimeError``."""
LONGEST_CLAUSE: Final = 100
MOST_UNSEEN: Final = 6
"""So many causes of what was not observed are shown, and so much of each: the rest is details."""
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

_PLACE: Final = re.compile(r" at [^\s:]+:\d+\b")
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a report comes to in one sentence.

    `level` is ``ok``, ``note``, ``warning``, ``error``, or ``unknown`` where nothing was found in a
    run that did not end well, has not ended, or of which not all is known.
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


def found_phrase(report: Report) -> str:
    """Return ``1 error, 2 notes``, or that nothing was found or checked."""
    nothing = "nothing found" if report.checked else "nothing was checked"
    return counts(report.findings) or nothing


def severity_word(severity: Severity) -> str:
    """Return what a person calls it: a finding of severity info is a note."""
    return "note" if severity is Severity.INFO else str(severity)


def headline(finding: Finding) -> str:
    """Return what was found without its details, and the code: ``… left the loop (COL011)``."""
    message = _PLACE.sub("", shown_text(" ".join(cut(finding.message, 2000).split())))
    clauses = re.split(r"(: |; | \(|, (?!(?:\d|and )))", message)
    first = clauses[0]
    for separator, clause in zip(clauses[1::2], clauses[2::2], strict=True):
        if len(first) >= SHORT_HEADLINE or separator == " (":
            break
        first += separator + clause
    if len(first) > LONGEST_HEADLINE:
        first = f"{first[:LONGEST_HEADLINE].rpartition(' ')[0] or first[:LONGEST_HEADLINE]} …"
    return f"{first} ({finding.code})"


def silence(report: Report) -> str:
    """Say which ranks nothing is known of; empty if there are none."""
    silent = report.silent_ranks
    if not silent:
        return ""
    verb, them = ("was", "it") if len(silent) == 1 else ("were", "them")
    unseen = f"{phrase(silent)} of {report.run.world_size} {verb} not observed"
    return f"{unseen}: nothing below is about {them}."


def coverage(report: Report, *, is_whole: bool = False, most: int = MOST_UNSEEN) -> str:
    """Say in a sentence how many checks looked, how many had nothing to look at, what was not seen.

    `is_whole`: it names what the run has none of. That is harmless, so it is only counted else.
    """
    known = subjects()
    reasons = codes_by_reason(report)
    meant = {each.reason: reasons.pop(each.reason, []) for each in (LIGHT, DESELECTED)}
    absent = {known[reason]: None for reason in reasons if reason in known}
    num_idle = sum(len(codes) for reason, codes in reasons.items() if reason in known)
    unseen = [f"{phrase(report.silent_ranks)}"] if report.silent_ranks else []
    unseen += {
        _short_of(reason, codes): None for reason, codes in reasons.items() if reason not in known
    }
    parts = [f"{count(len(report.checked), 'check')} looked"] * (is_whole or not is_healthy(report))
    if absent:
        idle = f"{num_idle} more" if parts else count(num_idle, "check")
        names = f"not present in this run: {', '.join(absent)}"
        parts.append(names if is_whole else f"{idle} had nothing to look at")
    parts += [f"{count(len(codes), 'check')}: {reason}" for reason, codes in meant.items() if codes]
    if unseen:
        shown = ", ".join(unseen[:most])
        more = f" and {len(unseen) - most} more" if len(unseen) > most else ""
        parts.append(f"not observed: {shown}{more}")
    hint = " (-v says why)" if report.not_checked and not is_whole else ""
    return f"{'; '.join(parts)}{hint}." if parts else ""


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


def shown_path(path: str, folder: str | None = None) -> str:
    """Return a path as a reader knows it: below the working directory, or within a package."""
    here = os.getcwd() if folder is None else folder
    package = max(path.rfind(name) for name in _PACKAGES)
    if package > 0:
        return f"…{path[package:]}"
    is_below = path.startswith(f"{here}/") and here != "/"
    return path[len(here) + 1 :] if is_below else path


def shown_text(text: str) -> str:
    """Return a text with the paths in it as `shown_path` has them."""
    if "/" not in text:
        return text
    words = re.split(r"([\s\"'(),]+)", text)
    return "".join(shown_path(word) if word.startswith("/") else word for word in words)


def count(number: int, word: str) -> str:
    """Return ``1 check`` or ``3 checks``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
