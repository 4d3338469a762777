"""PAR004: a learning-rate schedule is advanced once for each rank at every step."""

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

    ## What you see
    The learning rate reaches its end too early, by the number of ranks, and the rest of the
    training changes nothing. A framework advances a prepared scheduler once for each process.

    ## Example
        # wrong: 1000 steps on 4 ranks end after 250
        scheduler = get_scheduler("linear", optimizer, 0, 1000)
        scheduler = accelerator.prepare(scheduler)
        # right
        scheduler = get_scheduler("linear", optimizer, 0, 1000 * accelerator.num_processes)
        scheduler = accelerator.prepare(scheduler)

    ## How to fix
    Advance the scheduler once for each optimizer step, or multiply its number of steps by the
    number of processes.

    Changes: The learning rate of every step but the first.

    Leaves: The number of steps and what the optimizer holds.

    ## When it is not a defect
    The learning rate, printed at each step, is meant to end so early.

    If so, add `ignore = ["PAR004"]` to `distdiag.toml`.

    ## References
    - https://huggingface.co/docs/accelerate/package_reference/torch_wrappers
    """

    code = "PAR004"
    name = "overfast-schedule"
    severity = Severity.WARNING

    def check(self, view: ScheduleView) -> Iterator[Finding]:
        """Look at schedules that have come to their end."""
        world = len(view.expected_ranks)
        found = {r: s for r, s in view.by_rank.items() if _is_overfast(s, world)}
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
            "were taken at that rate"
        )
    return f"the {state.num_planned} steps of its plan were over by step {end}, and {more} followed"
