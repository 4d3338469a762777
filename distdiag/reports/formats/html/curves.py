"""Numbers of a run over its steps, one curve for each rank, and what was used of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

import msgspec

from distdiag.events.data import MetricGiven
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import StepEnd
from distdiag.events.logged import Logged, LossNumbers, MemoryUse
from distdiag.events.routing import Routing
from distdiag.events.stacks import Observed
from distdiag.events.updates import OptimizerUpdate
from distdiag.reports.recording import Recording

MOST_POINTS: Final = 40_000
"""So many points of all curves are in the page: some 16 bytes each."""
MOST_CHARTS: Final = 24
MOST_LOGGED: Final = 14
"""So many numbers that a program logs have a chart; some log hundreds."""
_TELLING: Final = re.compile(r"loss|grad|norm|lr|learning_rate|reward|kl|entropy", re.IGNORECASE)
FEWEST_POINTS: Final = 2
"""One point is no curve."""

Point = tuple[int, float | None]
"""A step and a value, None where that is no finite number."""
Named = tuple[str, str, int, int, float]
"""A chart, its unit, a rank, a step and a value."""


class Curve(msgspec.Struct):
    """The values of one rank."""

    rank: int
    points: list[Point]


class Chart(msgspec.Struct):
    """Curves of the same number on several ranks."""

    title: str
    unit: str
    curves: list[Curve]


class Usage(msgspec.Struct):
    """What a rank used of something when somebody looked from outside, in bytes."""

    title: str
    by_rank: list[tuple[int, int]]


def charts_of(recording: Recording) -> tuple[list[Chart], list[Chart]]:
    """Return the curves of training, and those of how tokens spread over experts."""
    return _charts(_training(recording)), _charts(_routing(recording))


def _training(recording: Recording) -> Iterator[Named]:
    for numbers in recording.of(LossNumbers):
        yield "loss that a backward pass began with", "", numbers.rank, numbers.step, numbers.loss
    yield from _logged(recording)
    for given in recording.of(MetricGiven):
        yield given.name, "", given.rank, given.number, given.value
    for sums in recording.of(GradientSums):
        norm = math.hypot(*(gradient.norm for gradient in sums.gradients))
        title = f"gradient norm of what this rank computed: {sums.model}"
        if sums.gradients:
            yield title, "", sums.rank, sums.step, norm
    for look in recording.of(OptimizerUpdate):
        yield from _update(look)
    for step in recording.of(StepEnd):
        yield "duration of a step", "s", step.rank, step.step, step.duration_s

    for use in recording.of(MemoryUse):
        where = "of the process" if use.memory == "host" else f"of tensors on GPU {use.device}"
        yield f"memory {where}", "B", use.rank, use.step, float(use.used_bytes)


def _update(look: OptimizerUpdate) -> Iterator[Named]:
    """Yield what a step of an optimizer did to the parameters that were looked at."""
    name, tensors = look.optimizer, [each for each in look.tensors if each.num_sampled]
    where = (look.rank, look.step)
    if not tensors:
        return
    yield (
        f"{name}: gradient norm at the step",
        "",
        *where,
        math.hypot(*(each.gradient_norm for each in tensors)),
    )
    unchanged = sum(each.num_unchanged for each in tensors)
    share = unchanged / sum(each.num_sampled for each in tensors)
    yield f"{name}: share of weights that the step left as they were", "", *where, share
    known = [each for each in tensors if not math.isnan(each.update)]
    weights = sum(each.weight * each.num_sampled for each in known)
    if weights:
        updates = sum(each.update * each.num_sampled for each in known)
        yield f"{name}: size of the update, of that of the weights", "", *where, updates / weights


def _logged(recording: Recording) -> Iterator[Named]:
    """Yield what the program itself logs, the names that people look at first before others."""
    by_name: dict[str, list[Named]] = {}
    for logged in recording.of(Logged):
        step = logged.logged_step if logged.logged_step >= 0 else logged.step
        for name, value in logged.values:
            by_name.setdefault(name, []).append((f"logged: {name}", "", logged.rank, step, value))
    first = sorted(by_name, key=lambda name: not _TELLING.search(name))
    for name in first[:MOST_LOGGED]:
        yield from by_name[name]


def _routing(recording: Recording) -> Iterator[Named]:
    for routing in recording.of(Routing):
        load = routing.load
        if load is None or routing.is_recompute:
            continue
        where = (routing.rank, routing.step)
        yield f"{routing.layer}: most loaded expert", "x even share", *where, load.peak
        yield f"{routing.layer}: share of idle experts", "", *where, load.idle_share
        if load.dropped_share >= 0:
            yield f"{routing.layer}: share of dropped tokens", "", *where, load.dropped_share


def _charts(values: Iterator[Named]) -> list[Chart]:
    found: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    for title, unit, rank, step, value in values:
        found.setdefault((title, unit), {}).setdefault(rank, {})[step] = value
    shown = list(found.items())[:MOST_CHARTS]
    num_curves = sum(len(by_rank) for _, by_rank in shown)
    most = max(8, MOST_POINTS // max(1, num_curves))
    charts = [
        Chart(title, unit, [_curve(rank, by_step, most) for rank, by_step in by_rank.items()])
        for (title, unit), by_rank in shown
    ]
    return [chart for chart in charts if any(len(c.points) >= FEWEST_POINTS for c in chart.curves)]


def _curve(rank: int, by_step: dict[int, float], most: int) -> Curve:
    """Return a curve of at most so many points; of each stretch the extremes stay."""
    steps = sorted(by_step)
    stretch = max(1, math.ceil(len(steps) / max(1, most // 2)))
    points: list[Point] = []
    for begin in range(0, len(steps), stretch):
        part = steps[begin : begin + stretch]
        odd = [step for step in part if not math.isfinite(by_step[step])]
        finite = [step for step in part if math.isfinite(by_step[step])]
        ends = [f(finite, key=by_step.__getitem__) for f in (min, max)] if finite else []
        points += [(s, _finite(by_step[s])) for s in sorted({*odd[:1], *ends})]
    return Curve(rank, points)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


_FIGURES: Final = {
    ("kernel", "rss_bytes"): "Memory of the process (resident)",
    ("kernel", "swap_bytes"): "Swapped out memory of the process",
    ("kernel", "memory_used_bytes"): "Memory used in its container or job",
    ("nvml", "memory_used_bytes"): "Memory used on its GPU",
}
"""What is shown of what sources saw, by source and name."""


def usages_of(recording: Recording) -> list[Usage]:
    """Return the last figures in bytes that sources outside of the ranks gave of them."""
    found: dict[str, dict[int, int]] = {}
    for seen in recording.of(Observed):
        for name, value in seen.values.items():
            title = _FIGURES.get((seen.source, name), "")
            if title and isinstance(value, int) and value > 0:
                found.setdefault(title, {})[seen.rank] = value
    return [Usage(title, sorted(by_rank.items())) for title, by_rank in found.items()]
