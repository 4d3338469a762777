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
    The rate jumps back to that of the first step, warm-up included, and the loss rises after the
    resume. The checkpoint holds the state of the schedule, but only weights and optimizer got
    theirs.

    ## Example
        # wrong: the schedule stays at its beginning
        optimizer.load_state_dict(state["optimizer"])
        # right
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    ## How to fix
    Load the state of the schedule into the new one, after the state of the optimizer.

    Changes: The learning rate from the resumed step on.

    Leaves: Runs that were resumed before, with other rates.

    ## When it is not a defect
    The same schedule is meant to be run through once more with the old state of the optimizer.

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
            f"{event.optimizer} resumes, and its {event.schedule} begins anew: the checkpoint has "
            f"one at step {event.saved_step}, which was not loaded",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=(event.schedule,),
            grade=Grade.LIKELY if event.same else Grade.NOTE,
            confidence=0.85,
            evidence=f"both have the same rates{f' and the same {alike}' if alike else ''}",
        )
