"""Findings as a person wants to read them: what is said of many ranks alike is said once."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding

_RANKS: Final = re.compile(r"\branks? \d+(?:[-,]\d+)*")


def said_once(findings: Iterable[Finding]) -> list[Finding]:
    """Put findings together that say the same of several ranks at the same place.

    Their ranks and their evidence become those of one finding, in the place of the first.
    """
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (
            finding.code,
            finding.severity,
            finding.grade,
            _RANKS.sub("ranks", finding.message),
            finding.location,
            finding.subjects,
        )
        alike.setdefault(key, []).append(finding)
    return [_merged(group) for group in alike.values()]


@dataclass(frozen=True, slots=True)
class Folded:
    """A finding, and those that say of the same line and subjects what follows from it.

    `is_repeated`: an earlier finding of the same check has the same explanation and fix.
    """

    finding: Finding
    also: tuple[Finding, ...] = ()
    is_repeated: bool = False


def folded(findings: Iterable[Finding]) -> list[Folded]:
    """Put what was seen once more by other checks under the finding that came first."""
    found: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        key: tuple[object, ...] = (finding.location, finding.subjects, finding.ranks)
        is_known = finding.location is not None and finding.subjects and finding.ranks
        found.setdefault(key if is_known else (number,), []).append(finding)
    seen: set[tuple[str, str, str]] = set()
    groups = []
    for first, *others in found.values():
        advice = (first.code, first.why, first.fix)
        groups.append(Folded(first, tuple(others), advice in seen))
        seen.add(advice)
    return groups


def _merged(group: list[Finding]) -> Finding:
    first = group[0]
    if len(group) == 1:
        return first
    ranks = RankSet(rank for finding in group for rank in finding.ranks)
    own = re.compile(rf"\b{re.escape(first.ranks.phrase())}\b(?![-,]\d)")
    return msgspec.structs.replace(
        first,
        message=own.sub(ranks.phrase(), first.message) if first.ranks else first.message,
        ranks=ranks,
        evidence=tuple(entry for finding in group for entry in finding.evidence),
    )
