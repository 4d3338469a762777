"""CKP009: a training is resumed, and its learning-rate schedule begins anew."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.alignment import RestartedScheduleView


class RestartedSchedule(Check[RestartedScheduleView]):
    """A training is resumed, and its learning-rate schedule begins anew.

    ## What you see
    The learning rate jumps back to that of the first step, warm-up included, and the loss rises
    after the resume. The checkpoint contains the state of the schedule, but the program loads only
    weights and optimizer.

    ## Example
        # wrong: the schedule stays at its beginning
        optimizer.load_state_dict(state["optimizer"])
        # right
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    ## How to fix
    Load the state of the schedule, after the state of the optimizer:
    `scheduler.load_state_dict(checkpoint["scheduler"])`.

    Changes: The learning rate from the resumed step on.

    Leaves: Runs that were already resumed, with wrong rates.

    ## When it is not a defect
    The same schedule is intended to run once more with the old state of the optimizer.

    If so, add `ignore = ["CKP009"]` to `distdiag.toml`. Where a schedule is a function of the
    program, nothing tells whether it is the same one, and it is only a note.

    ## References
    - https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    """

    code = "CKP009"
    name = "restarted-schedule"
    severity = Severity.WARNING

    def check(self, view: RestartedScheduleView) -> Iterator[Finding]:
        """Name the schedule, and where the one in the checkpoint stands."""
        ranks, event = RankSet(view.by_rank), view.any_event
        alike = ", ".join(event.same)
        yield self.finding(
            f"{event.optimizer} resumes, but its {event.schedule} starts from the beginning: the "
            f"checkpoint has its state at step {event.saved_step}, which was not loaded",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=(event.schedule,),
            grade=Grade.LIKELY if event.same else Grade.NOTE,
            confidence=0.85,
            evidence=f"the schedule and the one in the checkpoint have the same rates"
            f"{f' and the same {alike}' if alike else ''}",
        )
