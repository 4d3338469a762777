"""From what a comparison of runs found to one report, as any other run has it."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from distdiag.checks import load_checks
from distdiag.config.selection import Selection
from distdiag.engine import Engine
from distdiag.events.comparisons import Divergence, RoutingDifference
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Outcome, RankInfo, Report, Run, Severity
from distdiag.record.redaction import redacted

_OF_THE_PROGRAM: Final = Selection(ignore=("DIA",))
"""What a run alone says about the program; the agent's own problems stay in its own report."""


class Comparing(NamedTuple):
    """What was compared: the mode and command, where it is kept, since when, on how many ranks."""

    mode: str
    command: tuple[str, ...]
    folder: Path
    started: float
    num_ranks: int


def report_of(
    comparing: Comparing,
    differences: Sequence[Divergence] | Sequence[RoutingDifference],
    kind: type[Divergence] | type[RoutingDifference],
    *,
    ranks_of: Iterable[Report] = (),
    findings_of: Iterable[Report] = (),
    not_checked: Mapping[str, str] | None = None,
) -> Report:
    """Let the checks of such differences look at them, and put it all into one report.

    The last of the reports `ranks_of` says who the ranks are. What was found in the runs of
    `findings_of` alone goes into the report too.
    """
    world = RankSet(range(comparing.num_ranks))
    checks = [check() for check in load_checks().values() if kind in check.views]
    engine = Engine(checks, world)
    for difference in differences:
        engine.feed(difference)
    findings, checked = list(engine.findings), set(engine.checked)
    for report in findings_of:
        known = {finding.identity for finding in findings}
        findings += [
            finding
            for finding in report.findings
            if _OF_THE_PROGRAM.selects(finding.code) and finding.identity not in known
        ]
        checked |= set(report.checked)
    ranks, torch = _unknown(world), ""
    for report in ranks_of:
        ranks, torch = report.run.ranks or ranks, report.run.torch
    return Report(
        complete=True,
        run=Run(
            id=comparing.folder.name,
            command=tuple(redacted(comparing.command)),
            world_size=len(world),
            ranks=ranks,
            torch=torch,
            started=_rfc3339(comparing.started),
            ended=_rfc3339(time.time()),
            outcome=Outcome.FINISHED,
            active_modes=(comparing.mode,),
        ),
        findings=tuple(sorted(findings, key=lambda each: -each.severity.weight)),
        checked=tuple(sorted(checked)),
        not_checked=dict(not_checked or {}),
    )


def accepting(report: Report, codes: Collection[str]) -> Report:
    """Make notes of findings that the user takes as meant."""
    findings = (
        msgspec.structs.replace(
            each,
            severity=Severity.INFO,
            grade=Grade.NOTE,
            message=f"{each.message} (accepted as meant)",
        )
        if each.code in codes
        else each
        for each in report.findings
    )
    ordered = sorted(findings, key=lambda each: -each.severity.weight)
    return msgspec.structs.replace(report, findings=tuple(ordered))


def _unknown(world: RankSet) -> tuple[RankInfo, ...]:
    return tuple(
        RankInfo(rank=rank, local_rank=rank, world_size=len(world), hostname="", pid=0)
        for rank in world
    )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
