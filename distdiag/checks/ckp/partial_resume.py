"""CKP007: weights were loaded from a checkpoint, and the state of their optimizer was not."""

from collections.abc import Iterator, Mapping
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
    """Weights were loaded from a checkpoint, and the state of their optimizer was not.

    ## What you see
    The loss jumps after a resume, because the first steps are as large as at the start of a
    training, at the learning rate of the middle. The weights were loaded, but the optimizer begins
    without its moments.

    ## Example
        # wrong: the optimizer that was loaded is thrown away
        optimizer.load_state_dict(checkpoint["optimizer"])
        model = wrap(model)
        optimizer = AdamW(model.parameters())

        # right: load into the optimizer that steps
        model = wrap(model)
        optimizer = AdamW(model.parameters())
        optimizer.load_state_dict(checkpoint["optimizer"])

    ## How to fix
    Load the state of the optimizer from the same checkpoint:
    `optimizer.load_state_dict(checkpoint["optimizer"])`, into the optimizer object that steps,
    after it is created and wrapped.

    Changes: The updates after a resume.

    Leaves: Runs that were already resumed without the state.

    ## When it is not a defect
    The optimizer is intended to begin without state, as in a fine-tuning.

    To silence it, set `ignore = ["CKP007"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    """

    code = "CKP007"
    name = "partial-resume"
    severity = Severity.WARNING

    def check(self, alignment: ResumeView) -> Iterator[Finding]:
        """Judge each rank's optimizer, once for ranks with the same reason."""
        reasons: dict[_Reason, dict[int, TrainingResumed]] = {}
        for rank, event in alignment.by_rank.items():
            reason = _reason(event)
            if reason is not None:
                reasons.setdefault(reason, {})[rank] = event
        yield from self._of_one_rank(alignment.by_rank)
        for reason, by_rank in reasons.items():
            ranks, event = RankSet(by_rank), by_rank[min(by_rank)]
            yield self.finding(
                f"{event.optimizer} begins without state although the training is resumed: "
                f"{reason.text}",
                ranks=ranks,
                step=event.step,
                location=user_location(event.site.frames),
                subjects=(event.optimizer,),
                grade=reason.grade,
                confidence=reason.confidence,
                evidence=(Evidence(ranks=ranks, summary=_summary(event)),),
            )

    def _of_one_rank(self, by_rank: Mapping[int, TrainingResumed]) -> Iterator[Finding]:
        """Judge a state that one rank saved, though each keeps that of some parameters."""
        restored = {rank: event for rank, event in by_rank.items() if event.was_restored}
        whole = [rank for rank, event in restored.items() if not event.num_made]
        if len(restored) < 2 or len(whole) != 1:
            return
        ranks = RankSet(rank for rank in restored if rank not in whole)
        event = restored[min(ranks)]
        yield self.finding(
            f"{event.optimizer} goes on with the state that was loaded on rank {whole[0]} alone: "
            f"it begins anew for {event.num_made} of {event.num_parameters} parameters on "
            f"{ranks.phrase()}",
            ranks=ranks,
            step=event.step,
            location=user_location(event.site.frames),
            subjects=(event.optimizer,),
            grade=Grade.LIKELY,
            confidence=0.8,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"a state was loaded for {each.num_parameters - each.num_stateless} of "
                    f"{each.num_parameters} parameters, and the first step made one for "
                    f"{each.num_made} of the others",
                )
                for rank, each in sorted(restored.items())
            ),
            fix="Gather what each rank's optimizer keeps before one rank saves it, or let each "
            "rank save and load its own.",
        )


def _reason(event: TrainingResumed) -> _Reason | None:
    is_empty = event.num_stateless == event.num_parameters and not event.was_restored
    if not is_empty or not event.num_parameters:
        return None
    if event.num_left_out:
        text = (
            f"the distributed checkpoint holds {event.num_left_out} entries of it, which were not "
            "asked for: the optimizer had no state when it said what to load"
        )
        return _Reason(text, Grade.LIKELY, 0.9)
    if event.num_lost:
        text = f"{event.num_lost} entries of its state were loaded into a different optimizer, "
        text += "which never stepped"
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
