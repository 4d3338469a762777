"""What a run is asserted to be, for continuous integration: ``no-collapse:100``, ``loss<3.5``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from distdiag.events.errors import UsageError
from distdiag.findings.finding import Severity
from distdiag.metrics.cutting import steps_of, up_to
from distdiag.metrics.judging import Judgement, Kind, judge_runs
from distdiag.metrics.judging.noise import noise_of
from distdiag.metrics.judging.observation import spell_step, spell_value
from distdiag.metrics.runs import Run, Track

FINAL_VALUES: Final = 5
"""The final level of a series is the median of so many values."""
SIGMAS: Final = 2.0
"""The median of five values is within this of its level in 999 of 1,000 runs (0.54 sigma each)."""
KINDS: Final = {
    "no-nan": (Kind.NOT_FINITE,),
    "no-spike": (Kind.SPIKE,),
    "no-divergence": (Kind.DIVERGENCE, Kind.EXPLOSION, Kind.NOT_FINITE),
    "no-slowdown": (Kind.SLOWER, Kind.STRAGGLER),
}
COLLAPSE: Final = (
    *(Kind.NOT_FINITE, Kind.DIVERGENCE, Kind.EXPLOSION),
    *(Kind.ENTROPY_COLLAPSE, Kind.LOSS_SCALE),
)
CONDITION: Final = re.compile(r"(?P<series>[^<>=:]{1,200})(?P<sign>[<>])(?P<value>[^<>=]{1,40})")
KNOWN: Final = (
    "no-nan, no-collapse[:STEPS], no-divergence, no-spike, no-slowdown, no-warning, SERIES<VALUE, "
    "SERIES>VALUE"
)


class Verdict(msgspec.Struct, frozen=True):
    """Whether an assertion holds of a run, and why not."""

    assertion: str
    run: str
    holds: bool
    why: str = ""


def check(assertion: str, runs: tuple[Run, ...], judgement: Judgement) -> tuple[Verdict, ...]:
    """Tell of each run whether an assertion holds.

    Raises:
        UsageError: there is no such assertion, or no run has the series that it names.

    """
    return tuple(_verdict(assertion, run, judgement) for run in runs)


def _verdict(assertion: str, run: Run, judgement: Judgement) -> Verdict:
    seen = [each for each in judgement.observations if each.run == run.name]
    if assertion in KINDS:
        found = [each for each in seen if each.kind in KINDS[assertion]]
        worrying = [each for each in found if each.severity is not Severity.INFO]
        reasons = [each.message for each in worrying]
    elif assertion == "no-warning":
        reasons = [each.message for each in seen if each.severity is not Severity.INFO]
    elif assertion == "no-collapse" or assertion.startswith("no-collapse:"):
        reasons = list(_collapses(run, _num_steps(assertion)))
    elif match := CONDITION.fullmatch(assertion):
        reasons = list(_unmet(run, match))
    else:
        raise UsageError(f'unknown assertion "{assertion}" (there are: {KNOWN})')
    return Verdict(assertion, run.name, not reasons, "; ".join(reasons))


def _num_steps(assertion: str) -> int | None:
    _, colon, number = assertion.partition(":")
    if not colon:
        return None
    if not number.isdecimal() or not 0 < len(number) < 12 or int(number) == 0:
        raise UsageError(f'"{assertion}": after the colon stands a number of steps')
    return int(number)


def _collapses(run: Run, num_steps: int | None) -> Iterator[str]:
    """Yield what says that a run collapsed within its first steps; also that it has too few."""
    begin, end = steps_of(run)
    if num_steps is not None:
        last = begin + num_steps - 1
        if end < last:
            yield (
                f"the log ends at step {spell_step(end)}: {num_steps} steps would end at step "
                f"{spell_step(last)}"
            )
        run = Run(run.name, tuple(up_to(curves, last) for curves in run.curves))
    for seen in judge_runs([run]).of(*COLLAPSE):
        if seen.severity is not Severity.INFO:
            yield seen.message
    for track in run.tracks("loss"):
        yield from _above_start(track)
    for track in run.tracks("entropy"):
        if len(track) and (track.values[-FINAL_VALUES:] <= 0).all():
            yield f"{track.series.name} is {spell_value(float(track.values[-1]))} at the end"


def _above_start(track: Track) -> Iterator[str]:
    """Yield that a loss ends above the value that it began with, by more than its noise."""
    if len(track) < 2 * FINAL_VALUES or track.curves.attempt:
        return
    start = float(np.median(track.values[:FINAL_VALUES]))
    end = float(np.median(track.values[-FINAL_VALUES:]))
    if end > start + SIGMAS * noise_of(track.values):
        yield (
            f"{track.series.name} ends at {spell_value(end)}, above the {spell_value(start)} that "
            "it began with"
        )


def _unmet(run: Run, condition: re.Match[str]) -> Iterator[str]:
    name, sign = condition["series"].strip(), condition["sign"]
    try:
        bound = float(condition["value"])
    except ValueError:
        raise UsageError(f'"{condition[0]}": {condition["value"]!r} is not a number') from None
    tracks = [t for t in run.all_tracks() if name in (t.series.name, t.role)]
    if not tracks:
        raise UsageError(f'"{condition[0]}": {run.name} has no series "{name}"')
    last = max(track.curves.attempt for track in tracks)
    for track in tracks:
        if track.curves.attempt != last:
            continue
        values = track.series.values[-FINAL_VALUES:]
        level = float(np.median(values))
        if not (level < bound if sign == "<" else level > bound):
            where = f" of {track.ranks.phrase()}" if track.ranks else ""
            yield f"{track.series.name}{where} ends at {spell_value(level)}"
