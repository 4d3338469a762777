"""The findings of a run as they come, are replaced and are taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity

# Makes one finding of several that tell of one cause: the surest stands, the others support it.

Covers = Mapping[str, Collection[str]]
"""By code, the codes whose findings at the same line have the same cause."""

Explains = Mapping[str, Collection[str]]
"""By code, the codes whose findings on the same ranks follow from it."""


def folded(
    findings: Iterable[Finding], covers: Covers, explains: Explains = MappingProxyType({})
) -> tuple[Finding, ...]:
    """Return the findings without those that another one covers or explains: its evidence."""
    found = tuple(findings)
    causes, surest = _causes(found, explains), _surest(found)
    by_cover: dict[int, list[Finding]] = {}
    for place, each in enumerate(found):
        cause = _cause(each, found, causes)
        cover = _cover(place, found, surest, covers) if cause is None else cause
        others = by_cover.setdefault(cover, [])
        if cover != place:
            others.append(each)
    return tuple(_with(found[place], others) for place, others in sorted(by_cover.items()))


def _causes(found: Sequence[Finding], explains: Explains) -> dict[str, list[int]]:
    """Return by code the places of what may explain it: of each code and ranks the first."""
    causes: dict[str, list[int]] = {}
    seen: set[tuple[str, RankSet]] = set()
    for place, each in enumerate(found):
        explained = explains.get(each.code, ())
        if explained and each.severity is not Severity.INFO and (each.code, each.ranks) not in seen:
            seen.add((each.code, each.ranks))
            for code in explained:
                causes.setdefault(code, []).append(place)
    return causes


def _cause(finding: Finding, found: Sequence[Finding], causes: dict[str, list[int]]) -> int | None:
    """Return the place of the first finding that explains one, None if none does."""
    if finding.severity is Severity.INFO:
        return None
    places = causes.get(finding.code, ())
    return next((place for place in places if finding.ranks <= found[place].ranks), None)


Surest = dict[tuple[str, Location], int]
"""By code and line the place of the surest finding, of equal ones the first."""


def _surest(found: Sequence[Finding]) -> Surest:
    surest: Surest = {}
    for place, each in enumerate(found):
        if each.location is None:
            continue
        key = each.code, each.location
        best = surest.setdefault(key, place)
        if _weight(each) > _weight(found[best]):
            surest[key] = place
    return surest


def _weight(finding: Finding) -> tuple[int, float]:
    return finding.severity.weight, finding.confidence


def _cover(place: int, found: Sequence[Finding], surest: Surest, covers: Covers) -> int:
    """Return the place of the surest finding that covers one, or its own if that is surer."""
    mine = found[place]
    ways = [
        surest[code, mine.location]
        for code, covered in covers.items()
        if mine.code in covered and mine.location is not None and (code, mine.location) in surest
    ]

    def rank(other: int) -> tuple[int, float, bool, int]:
        each = found[other]
        return *_weight(each), each.code != mine.code, -other

    return max((place, *ways), key=rank)


def _with(finding: Finding, others: Sequence[Finding]) -> Finding:
    if not others:
        return finding
    alike = [o for o in others if (o.code, o.severity) == (finding.code, finding.severity)]
    more = tuple(
        Evidence(ranks=each.ranks, summary=each.message, location=each.location) for each in others
    )
    return msgspec.structs.replace(
        finding,
        severity=max((finding.severity, *(o.severity for o in others)), key=lambda s: s.weight),
        ranks=RankSet(rank for each in (finding, *alike) for rank in each.ranks),
        evidence=(*finding.evidence, *more),
    )


def with_earlier(findings: Iterable[Finding], earlier: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, and those of somebody who saw events that are not kept any more."""
    found = tuple(findings)
    known = {finding.identity for finding in found}
    places = {(each.code, each.location) for each in found if each.location is not None}
    more = (
        finding
        for finding in earlier
        if finding.identity not in known and (finding.code, finding.location) not in places
    )
    return (*found, *more)


# The store.

Identity = tuple[object, ...]

MOST_OF_A_CODE: Final = 2_000
"""So many findings of one check are kept, some 10 MB: what goes wrong in each step of a week is
found a million times, and the first say where. It is more than the ranks of most jobs."""

_LATER: Final = "(the job went on later: it was slow, not stuck)"


class FindingStore:
    """What the checks have concluded so far."""

    def __init__(
        self,
        covers: Covers,
        *,
        explains: Explains = MappingProxyType({}),
        gives_way: Collection[str] = (),
    ) -> None:
        """Begin with nothing.

        By code, `covers` says which codes tell of the same cause, `explains` which ones follow.

        Findings of the codes in `gives_way` are notes where something as severe is proven, and
        their notes are left out where anything else is wrong.
        """
        self._covers = covers
        self._explains = explains
        self._gives_way = frozenset(gives_way)
        self._findings: dict[Identity, Finding] = {}
        self._num_of_code: Counter[str] = Counter()
        self._left_out: set[str] = set()
        self._withdrawn: set[Identity] = set()
        self._newly_withdrawn: list[Finding] = []
        self._revised: dict[object, list[Finding]] = {}
        self._support: list[Evidence] = []

    def all(self) -> tuple[Finding, ...]:
        """Return each finding once: those that stand, in their order, then those that may grow.

        Of those with one cause one is returned.
        """
        found = dict(self._findings)
        for findings in self._revised.values():
            for finding in findings:
                _take(found, finding)
        kept = folded(found.values(), self._covers, self._explains)
        return tuple(self._supported(each) for each in self._in_their_places(kept))

    def _in_their_places(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """Yield the findings, those that give way to others as notes or not at all."""
        others = [each for each in findings if each.code not in self._gives_way]
        alarms = [each for each in others if each.severity is not Severity.INFO]
        proven = [each.severity.weight for each in alarms if each.grade is Grade.PROVEN]
        for each in findings:
            if each.code not in self._gives_way:
                yield each
            elif each.grade is Grade.NOTE:
                if not alarms:
                    yield each
            elif each.severity.weight > max(proven, default=-1):
                yield each
            else:
                yield msgspec.structs.replace(each, severity=Severity.INFO, grade=Grade.NOTE)

    def add(self, finding: Finding) -> None:
        """Take in a finding; one that stands already stays, unless it was but a note."""
        if finding.identity in self._withdrawn:
            self._withdrawn.discard(finding.identity)
            self._drop(finding.identity)
        if finding.identity in self._findings or self._has_room(finding.code):
            _take(self._findings, finding)

    def _has_room(self, code: str) -> bool:
        """Count one more finding of a code, unless there are enough."""
        if self._num_of_code[code] >= MOST_OF_A_CODE:
            self._left_out.add(code)
            return False
        self._num_of_code[code] += 1
        return True

    def _drop(self, identity: Identity) -> None:
        self._num_of_code[self._findings.pop(identity).code] -= 1

    def left_out(self) -> dict[str, str]:
        """Return which findings are not kept, and why."""
        return {
            f"findings of {code} after the first {MOST_OF_A_CODE:,}": "only so many are kept"
            for code in sorted(self._left_out)
        }

    def revise(self, subject: object, findings: list[Finding]) -> None:
        """Replace what was concluded about something that has grown since."""
        for earlier in self._revised.get(subject, ()):
            self._num_of_code[earlier.code] -= 1
        kept = [finding for finding in findings if self._has_room(finding.code)]
        if kept:
            self._revised[subject] = kept
        else:
            self._revised.pop(subject, None)

    def support(self, evidence: Evidence) -> None:
        """Add evidence to every finding of warning or above that names its ranks, now and later."""
        if evidence not in self._support:
            self._support.append(evidence)

    def _supported(self, finding: Finding) -> Finding:
        if finding.severity is Severity.INFO or not self._support:
            return finding
        more = tuple(each for each in self._support if each.ranks <= finding.ranks)
        return msgspec.structs.replace(finding, evidence=finding.evidence + more)

    def alarms(self) -> set[Identity]:
        """Return which findings stand that are warnings or worse."""
        return {
            identity
            for identity, finding in self._findings.items()
            if finding.severity is not Severity.INFO
        }

    def withdraw(self, identities: Iterable[Identity]) -> None:
        """Take back to a note what was said of a wait, since it ended after all."""
        for identity in self.alarms() & set(identities):
            finding = self._findings[identity]
            self._withdrawn.add(identity)
            note = self._findings[identity] = msgspec.structs.replace(
                finding,
                severity=Severity.INFO,
                grade=Grade.NOTE,
                message=f"{finding.message} {_LATER}",
            )
            self._newly_withdrawn.append(note)

    def take_withdrawn(self) -> list[Finding]:
        """Return the notes that are left of what was withdrawn since the last call."""
        withdrawn, self._newly_withdrawn = self._newly_withdrawn, []
        return withdrawn


def _take(findings: dict[Identity, Finding], finding: Finding) -> None:
    known = findings.setdefault(finding.identity, finding)
    if known.grade is Grade.NOTE and finding.grade is not Grade.NOTE:
        findings[finding.identity] = finding
