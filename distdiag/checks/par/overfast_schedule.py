"""PAR004: a learning-rate schedule is advanced once for each rank at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.data import ScheduleState
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import ScheduleView

_NOTHING: Final = 1e-3
"""A rate that is so small, relative to the highest one, is the end of a schedule."""


class OverfastSchedule(Check[ScheduleView]):
    """A learning-rate schedule is advanced once for each rank at every step.

    ## What it detects
    A scheduler that is advanced as many times for each optimizer step as there are ranks, whose
    rate has come to nothing or whose planned training steps are over, and at least half as many
    steps of the optimizer after that as before.

    ## Why it matters
    The rest of the training changes nothing: the rate came to its end too early by the number of
    ranks.

    ## Example
    A framework advances a prepared scheduler once for each process, and the number of training
    steps it was made with was already that of one process.

    ## How to fix
    Do not let the framework prepare the scheduler, or multiply its number of steps by the number of
    processes.

    ## References
    - `accelerate.scheduler.AcceleratedScheduler`
    """

    code = "PAR004"
    name = "overfast-schedule"
    severity = Severity.WARNING

    why = "The schedule was made for one advance at each step, and gets one for each rank."
    fix = "Advance the scheduler once for each optimizer step, or make it that much longer."
    fix_changes = "The learning rate of every step but the first."
    fix_leaves = "The number of steps and what the optimizer holds."
    disproof = "The learning rate, printed at each step, comes to its end with the training."

    def check(self, alignment: ScheduleView) -> Iterator[Finding]:
        """Look at schedules that have come to their end."""
        if alignment.kind != "data":
            return
        world = len(alignment.expected_ranks)
        found = {r: s for r, s in alignment.by_rank.items() if _is_overfast(s, world)}
        if not found:
            return
        first = found[min(found)]
        yield self.finding(
            f"{first.name} is advanced {world} times for each optimizer step, once for each rank: "
            f"{_ending(first, world)}",
            ranks=RankSet(found),
            step=_end(first, world),
            location=user_location(first.site.frames),
            subjects=(first.name,),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                Evidence(
                    ranks=RankSet(found),
                    summary=f"{first.num_advances} advances in {first.num_steps} steps; the rate "
                    f"was {first.peak_rate:g} at most and is {first.last_rate:g}",
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


def _is_overfast(state: ScheduleState, world: int) -> bool:
    is_each = world > 1 and state.least_pace == state.greatest_pace == world
    end = _end(state, world)
    return is_each and end > 0 and state.num_steps - end >= max(end / 2, 2)


def _end(state: ScheduleState, world: int) -> int:
    """Return the step at which a schedule came to its end, 0 if it did not."""
    if state.last_rate <= _NOTHING * state.peak_rate:
        return state.settled_at
    is_over = 0 < state.num_planned < state.num_advances
    return -(-state.num_planned // world) if is_over else 0


def _ending(state: ScheduleState, world: int) -> str:
    end = _end(state, world)
    more = state.num_steps - end
    if end == state.settled_at:
        return (
            f"the learning rate fell to {state.last_rate:g} by step {end}, and {more} more steps "
            "were taken with it"
        )
    return f"the {state.num_planned} steps of its plan were over by step {end}, and {more} followed"
