"""PAR004: a learning-rate schedule is advanced once for each rank at every step."""

from collections.abc import Iterator, Mapping
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.data import ScheduleState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import ScheduleView

_NOTHING: Final = 1e-3
"""A rate that is so small, relative to the highest one, is the end of a schedule."""
_OF_METRIC: Final = (
    "Take ReduceLROnPlateau out of what `accelerator.prepare(...)` is given, and go on calling "
    "`scheduler.step(value)` once for each epoch on every rank."
)


class OverfastSchedule(Check[ScheduleView]):
    """A learning-rate schedule is advanced once for each rank at every step.

    ## What you see
    The learning rate falls N times too fast on N ranks, and the rest of the training changes
    nothing: accelerate steps a scheduler that it has prepared once for each process. For
    ReduceLROnPlateau one value then counts as N epochs without progress.

    ## Example
        # wrong: 1000 steps on 4 ranks end after 250
        scheduler = get_scheduler("linear", optimizer, 0, 1000)
        scheduler = accelerator.prepare(scheduler)
        # right
        scheduler = get_scheduler("linear", optimizer, 0, 1000 * accelerator.num_processes)
        scheduler = accelerator.prepare(scheduler)

    ## How to fix
    Call `step()` of the scheduler once for each optimizer step: do not hand it to
    `accelerator.prepare`, or multiply its number of steps by `accelerator.num_processes`.

    Changes: The learning rate of every step but the first.

    Leaves: The number of steps and what the optimizer holds.

    ## When it is not a defect
    The learning rate, printed at each step, is intended to end so early.

    If so, add `ignore = ["PAR004"]` to `distdiag.toml`.

    ## References
    - https://huggingface.co/docs/accelerate/package_reference/torch_wrappers
    """

    code = "PAR004"
    name = "overfast-schedule"
    severity = Severity.WARNING

    def check(self, view: ScheduleView) -> Iterator[Finding]:
        """Look at schedules that are advanced as often as there are ranks."""
        world = len(view.expected_ranks)
        found = {r: s for r, s in view.by_rank.items() if is_overfast(s) and pace(s) == world}
        if found:
            yield fast_finding(self, found, ", once for each rank")


def pace(state: ScheduleState) -> int:
    """Return how often a schedule is advanced in each unit; 0: not always equally often."""
    return state.greatest_pace if state.least_pace == state.greatest_pace else 0


def is_overfast(state: ScheduleState) -> bool:
    """Say whether it is advanced several times in each unit, and that matters."""
    each = pace(state)
    if each < 2:
        return False
    if state.follows_metric:
        return state.num_advances >= 2 * each  # what happened once may have a reason
    end = _end(state)
    return end > 0 and state.num_steps - end >= max(end / 2, 2)


def fast_finding(
    check: Check[ScheduleView], found: Mapping[int, ScheduleState], reason: str
) -> Finding:
    """Say how often a schedule is advanced, and what that did to the rate."""
    first = found[min(found)]
    if first.follows_metric:
        what = f"{first.name} is given each value {pace(first)} times{reason}: {_patience(first)}"
    else:
        what = (
            f"{first.name} is advanced {pace(first)} times for each optimizer step{reason}: "
            f"{_ending(first)}"
        )
    return check.finding(
        what,
        ranks=RankSet(found),
        step=first.num_steps if first.follows_metric else _end(first),
        location=user_location(first.site.frames),
        subjects=(first.name,),
        grade=Grade.LIKELY,
        confidence=0.9,
        fix=_OF_METRIC if reason and first.follows_metric else check.fix,
        evidence=(
            Evidence(
                ranks=RankSet(found),
                summary=f"{first.num_advances} calls of step() in {first.num_steps} steps; the "
                f"rate was {first.peak_rate:g} at most and is {first.last_rate:g}",
                values={
                    "num_advances": first.num_advances,
                    "num_steps": first.num_steps,
                    "settled_at": first.settled_at,
                    "last_rate": first.last_rate,
                    "num_planned": first.num_planned,
                },
            ),
        ),
    )


def _end(state: ScheduleState) -> int:
    """Return the step at which a schedule came to its end, 0 if it did not."""
    if state.last_rate <= _NOTHING * state.peak_rate:
        return state.settled_at
    return _end_of_plan(state)


def _end_of_plan(state: ScheduleState) -> int:
    """Return the step at which a plan for all of the optimizer's steps was over, 0 if none was."""
    is_over = state.num_steps <= state.num_planned < state.num_advances
    return -(-state.num_planned // pace(state)) if is_over else 0


def _ending(state: ScheduleState) -> str:
    end = _end(state)
    more = state.num_steps - end
    if end == state.settled_at:
        return (
            f"the learning rate fell to {state.last_rate:g} by step {end}, and {more} more steps "
            "were taken at that rate"
        )
    return f"the {state.num_planned} steps of its plan were over by step {end}, and {more} followed"


def _patience(state: ScheduleState) -> str:
    each = f"it counts each as {pace(state)} epochs, and its patience is over too early"
    if state.last_rate < state.peak_rate:
        return f"{each}; the learning rate fell from {state.peak_rate:g} to {state.last_rate:g}"
    return each
