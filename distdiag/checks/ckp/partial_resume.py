"""CKP007: weights are resumed and the state of their optimizer is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from distdiag.checks.base import Check
from distdiag.events.checkpoints import TrainingResumed
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import ResumeView


class _Reason(NamedTuple):
    text: str
    grade: Grade
    confidence: float


class PartialResume(Check[ResumeView]):
    """Weights are resumed and the state of their optimizer is not.

    ## What it detects
    An optimizer with a state of its own (momentum, second moments) that begins without any although
    its weights and its learning rate schedule were loaded, or whose state was loaded into another
    optimizer that never steps. That only the weights were loaded from a file with more in it is a
    note: a fine-tuning does so on purpose.

    ## Why it matters
    The first steps after a resume are as large as those at the start of a training, at the learning
    rate of the middle: the loss jumps.

    ## Example
    `optimizer.load_state_dict(...)`, and later `optimizer = AdamW(model.parameters())` again
    because the model was wrapped.

    ## How to fix
    Load the optimizer's state too, into the optimizer that steps.

    ## References
    - https://pytorch.org/tutorials/beginner/saving_loading_models.html
    """

    code = "CKP007"
    name = "partial-resume"
    severity = Severity.WARNING

    why = "An optimizer whose state was not loaded estimates its moments anew."
    fix = "Load the state of the optimizer from the same checkpoint, after it was made for good."
    fix_changes = "The updates after a resume."
    fix_leaves = "Runs that were resumed without the state."
    disproof = "The optimizer is meant to begin anew."

    def check(self, alignment: ResumeView) -> Iterator[Finding]:
        """Judge each rank's optimizer, once for ranks that say the same."""
        reasons: dict[_Reason, dict[int, TrainingResumed]] = {}
        for rank, event in alignment.by_rank.items():
            reason = _reason(event)
            if reason is not None:
                reasons.setdefault(reason, {})[rank] = event
        for reason, by_rank in reasons.items():
            ranks, event = RankSet(by_rank), by_rank[min(by_rank)]
            yield self.finding(
                f"{event.optimizer} begins without the state of a training that is resumed: "
                f"{reason.text}",
                ranks=ranks,
                step=event.step,
                location=user_location(event.site.frames),
                subjects=(event.optimizer,),
                grade=reason.grade,
                confidence=reason.confidence,
                evidence=(Evidence(ranks=ranks, summary=_summary(event)),),
            )


def _reason(event: TrainingResumed) -> _Reason | None:
    is_empty = event.num_stateless == event.num_parameters and not event.was_restored
    if not is_empty or not event.num_parameters:
        return None
    if event.num_lost:
        text = f"{event.num_lost} entries were loaded into another one that never stepped"
        return _Reason(text, Grade.LIKELY, 0.9)
    if 2 * event.num_loaded < event.num_parameters:
        return None
    if event.schedule_step > 0 and event.offered:
        text = f"its weights and its schedule (at step {event.schedule_step}) were loaded"
        return _Reason(text, Grade.LIKELY, 0.85)
    if event.offered > 0:
        text = f"the file of its weights holds {event.offered} entries of such a state"
        return _Reason(text, Grade.NOTE, 0.4)
    return None


def _summary(event: TrainingResumed) -> str:
    seen = f"{event.num_loaded} of {event.num_parameters} parameters were loaded"
    return f"{seen}, {event.num_stateless} had no state before the first step"
