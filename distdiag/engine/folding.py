"""Makes one finding of several that tell of one cause: the surest stands, the others support it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from distdiag.finding import Evidence, Finding
from distdiag.ranks import RankSet

Covers = Mapping[str, Collection[str]]
"""By code, the codes whose findings at the same line have the same cause."""


def folded(findings: Iterable[Finding], covers: Covers) -> tuple[Finding, ...]:
    """Return the findings without those that another one covers, which become its evidence."""
    found = tuple(findings)
    by_cover: dict[int, list[Finding]] = {}
    for place, each in enumerate(found):
        cover = _cover(place, found, covers)
        others = by_cover.setdefault(cover, [])
        if cover != place:
            others.append(each)
    return tuple(_with(found[place], others) for place, others in sorted(by_cover.items()))


def _cover(place: int, found: Sequence[Finding], covers: Covers) -> int:
    """Return the place of the surest finding that covers one, or its own if that is surer."""
    mine = found[place]
    ways = [
        other
        for other, each in enumerate(found)
        if mine.code in covers.get(each.code, ())
        and each.location is not None
        and each.location == mine.location
    ]

    def rank(other: int) -> tuple[int, float, bool, int]:
        each = found[other]
        return each.severity.weight, each.confidence, each.code != mine.code, -other

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
        ranks=RankSet(rank for each in (finding, *alike) for rank in each.ranks),
        evidence=(*finding.evidence, *more),
    )
