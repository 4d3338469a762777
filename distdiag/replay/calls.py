"""Finds what each rank called in the process group of a finding, up to the first contradiction."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distdiag.analysis.run_folders import find_run_folders
from distdiag.events.collectives import Collective, ProcessGroup
from distdiag.events.errors import UsageError
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Report
from distdiag.record.wire import Interner
from distdiag.views.alignment import Alignment
from distdiag.views.invariants import contradiction

PARTING: Final = frozenset(
    {
        "COL001",
        "COL002",
        "COL003",
        "COL004",
        "COL005",
        "COL006",
        "COL007",
        "COL009",
        "COL011",
    }
)
"""Findings of ranks whose calls in one process group do not fit together."""

Calls = Mapping[int, Sequence[Collective]]


@dataclass(frozen=True, slots=True)
class CallsToReplay:
    """The calls of the ranks of one group, the last ones of which do not fit together."""

    run_id: str
    world_size: int
    group: ProcessGroup
    finding: Finding
    calls: Calls


def find_calls(root: Path, report: Report) -> CallsToReplay:
    """Return the calls that lead to the first collective finding of a run.

    Raises:
        UsageError: the report has no such finding, or the calls are not there any more.

    """
    findings = [finding for finding in report.findings if finding.code in PARTING]
    if not findings:
        raise UsageError(
            f"{root}: the report has no finding of collectives that do not fit together "
            f"({', '.join(sorted(PARTING))}), so there is nothing to replay"
        )
    for finding in sorted(findings, key=lambda f: -f.severity.weight):
        found = min(_partings(root, finding), default=None, key=lambda each: each[0])
        if found is not None:
            _, group, calls = found
            return CallsToReplay(report.run.id, report.run.world_size, group, finding, calls)
    raise UsageError(
        f"{root}: the calls that {findings[0].code} is about are not among its event files"
    )


def _partings(root: Path, finding: Finding) -> Iterator[tuple[int, ProcessGroup, Calls]]:
    """Yield for each group where its ranks part: when, the group, and the calls up to there."""
    is_about_sites = finding.code == "COL007"
    for group, calls in _by_group(root).items():
        last = _first_parting(group, calls, by_site=is_about_sites)
        if last is None:
            continue
        upto = {r: [c for c in calls[r] if c.collective_seq_id <= last] for r in calls}
        yield min(c.time_ns for each in upto.values() for c in each[-1:]), group, upto


def _by_group(root: Path) -> dict[ProcessGroup, dict[int, list[Collective]]]:
    groups: dict[ProcessGroup, dict[int, list[Collective]]] = {}
    interner = Interner()
    for folder in find_run_folders([root]):
        for _, event in folder.timed_events(interner):
            if isinstance(event, Collective) and event.collective_seq_id >= 0:
                groups.setdefault(event.group, {}).setdefault(event.rank, []).append(event)
    return groups


def _first_parting(
    group: ProcessGroup, calls: Mapping[int, list[Collective]], *, by_site: bool
) -> int | None:
    """Return the number of the first call that contradicts another, or that some ranks lack."""
    by_number: dict[int, dict[int, Collective]] = {}
    for rank, made in calls.items():
        for call in made:
            by_number.setdefault(call.collective_seq_id, {})[rank] = call
    for number in sorted(by_number):
        by_rank = by_number[number]
        if len(by_rank) < len(group.ranks):
            return number
        key = (group.label, number)
        alignment = Alignment("collective", key, by_rank, RankSet(group.ranks))
        if contradiction(alignment) is not None:
            return number
        if by_site and len({call.site.location for call in by_rank.values()}) > 1:
            return number
    return None
