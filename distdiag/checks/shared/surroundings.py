"""What checks say of surroundings that differ between ranks."""

from collections.abc import Mapping
from typing import Any

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade

_NOT_SET = "not set"


def differences(
    check: Check[Any],
    found: Mapping[str, Mapping[str, RankSet]],
    what: str,
    *,
    grade: Grade = Grade.PROVEN,
) -> Finding:
    """Return the finding that ranks have different ones of these, by name and value."""
    name, first = next(iter(found.items()))
    parts = [f"{value or _NOT_SET} on {ranks.phrase()}" for value, ranks in first.items()]
    more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
    odd = min(first.values(), key=len)
    others = RankSet(rank for ranks in first.values() for rank in ranks)
    return check.finding(
        f"ranks have different {what}: {name} is {' and '.join(parts)}{more}",
        ranks=odd if len(first) == 2 and 2 * len(odd) < len(others) else others,
        subjects=tuple(found),
        grade=grade,
        evidence=tuple(
            Evidence(ranks=ranks, summary=f"{each} is {value or _NOT_SET}")
            for each, values in found.items()
            for value, ranks in values.items()
        ),
    )
