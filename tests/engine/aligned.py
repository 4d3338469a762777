"""Feeds events to one aligner, or to a whole engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from distdiag.checks import load_checks
from distdiag.checks.base import Check
from distdiag.engine.aligner import Aligner, CallOrder, Gap, Job
from distdiag.engine.creations import Creations
from distdiag.engine.engine import Engine
from distdiag.engine.ranks import RankStates, RankTracker
from distdiag.engine.runner import CheckRunner
from distdiag.events.base import Event
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Finding
from distdiag.views.base import View
from tests.checks.streams import event_of


class Aligned(NamedTuple):
    """What came of events: the views of an aligner, its gaps, and what checks found in them."""

    views: list[View]
    gaps: dict[type[View | Event], Gap]
    findings: tuple[Finding, ...]

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]

    def why(self, view: type[View | Event]) -> str:
        """Say why there was no such view, empty if nothing was missing."""
        return self.gaps[view].reason if view in self.gaps else ""


def job_of(runner: CheckRunner, world: Iterable[int] = (0, 1), **options: Any) -> Job:
    """Return what an aligner may know of a run of these ranks, of which nothing is known yet.

    `options` are further fields of the `Job`.
    """
    ranks = RankSet(world)
    trackers = {rank: RankTracker(rank) for rank in ranks}
    states = RankStates(trackers, lambda _: (), 0)
    return Job(ranks, lambda: states, trackers, runner.store, CallOrder(), **options)


def aligned(
    kind: type[Aligner],
    *events: Event,
    checks: Iterable[Check[Any]] = (),
    ends: bool = True,
    **options: Any,
) -> Aligned:
    """Let one aligner take in events, and checks judge its views."""
    runner = CheckRunner(checks, Creations())
    aligner = kind(job_of(runner, **options))
    views = [v for event in events if isinstance(event, kind.needs) for v in aligner.feed(event)]
    if ends:
        views += aligner.end()
    for view in views:
        runner.show(view)
    assert not runner.disabled
    return Aligned(views, dict(aligner.gaps()), runner.store.all())


def engine_of(
    *events: Event,
    world: Iterable[int] = (0, 1),
    checks: Iterable[Check[Any]] | None = None,
    ends: bool = True,
    **options: Any,
) -> Engine:
    """Return the engine that took in these events, with all checks where none are named."""
    if checks is None:
        checks = [check() for check in load_checks().values()]
    engine = Engine(checks, RankSet(world), **options)
    for event in events:
        engine.feed(event)
    if ends:
        engine.finish()
    return engine


def broken(rank: int, probe: str, reason: str = "it broke") -> ProbeDisabled:
    """Tell that a probe of a rank was switched off."""
    return event_of(ProbeDisabled, rank, probe=probe, reason=reason)
