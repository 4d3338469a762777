"""SHD020: an optimizer holds parameters that never got a gradient."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.models import UntrainedView


class UntrainedParameter(Check[UntrainedView]):
    """An optimizer holds trainable parameters that had no gradient at any look.

    ## What it detects
    Parameters of an optimizer whose `grad` was None at all steps that were looked at, while others
    had one. Where some ranks never have the gradient of a parameter that others hold copies of and
    always have it, it is a warning; where all ranks are alike it is a note.

    ## Why it matters
    Optimizers skip such parameters and say nothing. If it is so on some ranks only, the copies
    part: one is trained and the other is not.

    ## Example
    A tower or head that the loss never reaches; a branch that only one rank takes.

    ## How to fix
    Use the parameters in the loss on every rank, if only with the factor zero; or freeze them, or
    leave them out of the optimizer.

    ## References
    - `torch.nn.parallel.DistributedDataParallel` (`find_unused_parameters`)
    """

    code = "SHD020"
    name = "untrained-parameter"
    severity = Severity.WARNING

    why = "A parameter that the loss does not depend on gets no gradient, and no error says so."
    fix = "Let the loss depend on the parameters, or set their `requires_grad` to False."
    fix_changes = "The parameters begin to train, or are known not to."
    fix_leaves = "Checkpoints, which hold the values with which the parameters were made."
    disproof = "The parameters have gradients at the steps that were not looked at."

    def check(self, view: UntrainedView) -> Iterator[Finding]:
        """Tell what ranks treat differently from what nobody trains."""
        if view.parted:
            names = tuple(view.parted)
            ranks = RankSet(r for r, never in view.never.items() if set(names) & set(never))
            having = view.parted[names[0]]
            yield self._about(
                view,
                names,
                ranks,
                f"{first_and_more(names)} never had a gradient on {ranks.phrase()} and always on "
                f"{having.phrase()}, though these hold copies of one parameter",
                Grade.LIKELY,
            )
        ranks = RankSet(r for r, never in view.never.items() if set(never) - set(view.parted))
        if ranks:
            never = view.never[min(ranks)]
            names = tuple(name for name in never if name not in view.parted)
            yield self._about(
                view,
                names,
                ranks,
                f"{first_and_more(names)} of {view.optimizer} had no gradient at any of "
                f"{view.num_looks} looks on {ranks.phrase()}",
                Grade.NOTE,
            )

    def _about(
        self,
        view: UntrainedView,
        names: tuple[str, ...],
        ranks: RankSet,
        message: str,
        grade: Grade,
    ) -> Finding:
        location = user_location(view.sites[min(ranks)].frames)
        summary = f"`grad` was None at {view.num_looks} steps: {', '.join(names[:5])}"
        return self.finding(
            message,
            ranks=ranks,
            location=location,
            subjects=names,
            grade=grade,
            confidence=0.8,
            evidence=(Evidence(ranks=ranks, summary=summary, location=location),),
        )
