"""Findings as a person wants to read them: what is said of many ranks alike is said once."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Location

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
    found: list[list[Finding]] = []
    for finding in findings:
        group = next((each for each in found if _is_of_one_thing(each[0], finding)), None)
        if group is None:
            found.append([finding])
        else:
            group.append(finding)
    seen: set[tuple[str, str, str]] = set()
    groups = []
    for first, *others in found:
        advice = (first.code, first.why, first.fix)
        groups.append(Folded(first, tuple(others), advice in seen))
        seen.add(advice)
    return groups


def _is_of_one_thing(first: Finding, other: Finding) -> bool:
    """Say whether two findings show one fault: of the same ranks, subjects and place.

    Checks of one family need not agree wholly: one names a place that the other one shows, and
    some of its subjects.
    """
    if not (first.ranks and first.ranks == other.ranks and first.subjects and first.location):
        return False
    if first.subjects == other.subjects and first.location == other.location:
        return True
    is_family = _family(first) == _family(other) and first.code != other.code
    return (
        is_family
        and not set(first.subjects).isdisjoint(other.subjects)
        and other.location is not None
        and (other.location in _places(first) or first.location in _places(other))
    )


def _family(finding: Finding) -> str:
    return finding.code.rstrip("0123456789")


def _places(finding: Finding) -> set[Location | None]:
    return {finding.location, *(each.location for each in finding.evidence)}


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
