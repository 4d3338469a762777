"""What the curves of all runs tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.metrics.judging import (
    collapse,
    divergence,
    gradients,
    nonfinite,
    plateaus,
    ranks,
    rates,
    restarts,
    scales,
    speed,
    spikes,
    validation,
)
from distdiag.metrics.judging.observation import Judgement, Kind, Observation
from distdiag.metrics.runs import Run, runs_of
from distdiag.metrics.series import Curves

JUDGES: Final[tuple[Callable[[Run], Iterator[Observation]], ...]] = (
    nonfinite.look,
    divergence.look,
    spikes.look,
    gradients.look,
    plateaus.look,
    rates.look,
    scales.look,
    validation.look,
    speed.look,
    collapse.look,
    ranks.look,
    restarts.look,
)
"""Each looks at one run, and says what it sees."""
LOSING: Final = (Kind.DIVERGENCE, Kind.EXPLOSION)


def judge(curves: Iterable[Curves]) -> Judgement:
    """Say what curves tell: of each run, of its ranks and attempts."""
    return judge_runs(runs_of(curves))


def judge_runs(runs: Iterable[Run]) -> Judgement:
    """Say what runs tell that are joined already."""
    # Values near the largest float64 overflow in differences; infinities compare as they should.
    with np.errstate(all="ignore"):
        seen = [each for run in runs for look in JUDGES for each in look(run)]
    order = sorted(
        _merged(_causes(seen)), key=lambda each: (-each.severity.weight, each.run, each.step or 0.0)
    )
    return Judgement(observations=tuple(order))


def _causes(seen: list[Observation]) -> Iterator[Observation]:
    """Yield what is no consequence: later spikes, and plateaus, of a run that diverges are."""
    lost: dict[tuple[object, ...], float] = {}
    for each in seen:
        if each.kind in LOSING and each.severity is not Severity.INFO and each.step is not None:
            key = (each.run, each.ranks, each.attempt)
            lost[key] = min(each.step, lost.get(key, each.step))
    for each in seen:
        begin = lost.get((each.run, each.ranks, each.attempt))
        is_plateau = begin is not None and each.kind is Kind.PLATEAU
        is_later = begin is not None and each.step is not None and each.step > begin
        if not is_plateau and not (is_later and each.kind is Kind.SPIKE):
            yield each


def _merged(seen: Iterable[Observation]) -> Iterator[Observation]:
    """Yield once what is seen on several ranks alike."""
    alike: dict[tuple[object, ...], list[Observation]] = {}
    for each in seen:
        key = (each.kind, each.severity, each.run, each.series, each.attempt, each.step)
        alike.setdefault(key, []).append(each)
    for first, *more in alike.values():
        ranks = RankSet(rank for each in (first, *more) for rank in each.ranks)
        yield msgspec.structs.replace(first, ranks=ranks) if more else first
