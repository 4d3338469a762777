"""From what a comparison found to one report, as any other run has it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.events.comparisons import Disparity
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding, Outcome, RankInfo, Report, Run
from distdiag.parity.runs import FINDINGS
from distdiag.parity.study import Outcome as StudyOutcome
from distdiag.reports import read_report


def judge(disparities: Iterable[Disparity], world: RankSet) -> Engine:
    """Let the checks of parity judge what differs."""
    checks = [check() for check in load_checks().values() if Disparity in check.views]
    engine = Engine(checks, world)
    for disparity in disparities:
        engine.feed(disparity)
    return engine


def report_of(
    outcomes: Sequence[StudyOutcome], command: tuple[str, ...], folder: Path, started: float
) -> Report:
    """Put the comparison and what was found in its runs into one report."""
    world = RankSet(range(max(outcome.configuration.num_ranks for outcome in outcomes)))
    found = [each for each in (outcome.result.disparity for outcome in outcomes) if each]
    engine = judge(found, world)
    own_codes = {code for code, check in load_checks().items() if check.is_about_tool}
    findings, checked, torch = list(engine.findings), list(engine.checked), ""
    ranks: tuple[RankInfo, ...] = ()
    not_checked: dict[str, str] = {}
    for outcome in outcomes:
        own = _own_report(folder / outcome.name / FINDINGS)
        if own is not None:
            told = [f for f in own.findings if f.code not in own_codes]
            findings += [f for f in told if not _known(f, findings)]
            checked += [code for code in own.checked if code not in checked]
            torch, ranks = own.run.torch, own.run.ranks or ranks
        label = outcome.configuration.label
        for name, why in outcome.result.not_compared.items():
            not_checked[f"{label}: {name}"] = why
    return Report(
        complete=True,
        run=Run(
            id=folder.name,
            command=command,
            world_size=len(world),
            ranks=ranks or _unknown(world),
            torch=torch,
            started=_rfc3339(started),
            ended=_rfc3339(time.time()),
            outcome=Outcome.FINISHED,
            active_modes=("parity",),
        ),
        findings=tuple(sorted(findings, key=lambda each: -each.severity.weight)),
        checked=tuple(sorted(checked)),
        not_checked=not_checked,
    )


def _known(finding: Finding, others: Iterable[Finding]) -> bool:
    return any(finding.identity == other.identity for other in others)


def _own_report(path: Path) -> Report | None:
    """Return what was found in one of the runs alone, None if nobody has written it."""
    try:
        return read_report(path)
    except (UsageError, DamagedFileError):
        return None


def _unknown(world: RankSet) -> tuple[RankInfo, ...]:
    return tuple(
        RankInfo(rank=rank, local_rank=rank, world_size=len(world), hostname="", pid=0)
        for rank in world
    )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
