"""PAR014: a learning-rate schedule is advanced several times for each step that it counts."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.par.overfast_schedule import fast_finding, is_overfast, pace
from distdiag.findings.finding import Finding, Severity
from distdiag.views.alignment import ScheduleView


class ScheduleOutrunsSteps(Check[ScheduleView]):
    """A learning-rate schedule is advanced several times for each step that it counts.

    ## What you see
    The schedule ends long before the training, and the rest runs at its last learning rate, or at a
    rate that rises again. The scheduler steps several times for each optimizer step: once for each
    micro-batch, or a scheduler that follows a metric gets each value more than once.

    ## Example
        for number, batch in enumerate(loader):
            loss_of(batch).backward()
            if (number + 1) % 4 == 0:
                optimizer.step()
            scheduler.step()      # wrong: four times for each step of the optimizer
        # right: behind `optimizer.step()`, under the same condition

    ## How to fix
    Call `scheduler.step()` only where the optimizer steps, right after `optimizer.step()`. Or
    create the schedule for the number of micro-batches.

    Changes: The learning rate of every step but the first.

    Leaves: The number of steps and what the optimizer holds.

    ## When it is not a defect
    The learning rate, printed at each step, is intended to end so early.

    If so, add `ignore = ["PAR014"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
    """

    code = "PAR014"
    name = "schedule-outruns-steps"
    severity = Severity.WARNING

    def check(self, view: ScheduleView) -> Iterator[Finding]:
        """Look at schedules whose advances do not fit their plan, though the steps do."""
        world = len(view.expected_ranks)
        found = {
            rank: state
            for rank, state in view.by_rank.items()
            if is_overfast(state)
            and pace(state) != world
            and (state.follows_metric or state.num_steps <= state.num_planned < state.num_advances)
        }
        if found:
            yield fast_finding(self, found, "")
