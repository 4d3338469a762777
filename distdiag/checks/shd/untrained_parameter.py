"""SHD020: an optimizer holds parameters that never got a gradient."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.replicas import first_and_more
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.models import UntrainedView


class UntrainedParameter(Check[UntrainedView]):
    """An optimizer holds trainable parameters that never had a gradient.

    ## What you see
    These parameters keep their first values: the loss does not depend on them, and optimizers skip
    parameters without a gradient, without an error. If only some ranks have a gradient for them,
    the copies diverge.

    ## Example
        # wrong: only some ranks use the vision tower
        loss = text_loss + vision_loss if has_images else text_loss
        # right: every rank has a gradient, of zeros at least
        if not has_images:
            vision_loss = 0.0 * model.vision(dummy_image).sum()
        loss = text_loss + vision_loss

    ## How to fix
    Use the parameters in the loss on every rank (if need be with factor zero:
    `loss = loss + 0.0 * p.sum()`). Or freeze them with `p.requires_grad_(False)` before the
    optimizer is created.

    Changes: The parameters begin to train, or are frozen openly.

    Leaves: Checkpoints, which hold the initial values of these parameters.

    ## When it is not a defect
    The parameters are used from a later step on, or only in steps that were not sampled.

    If so, add `ignore = ["SHD020"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    code = "SHD020"
    name = "untrained-parameter"
    severity = Severity.WARNING

    def check(self, view: UntrainedView) -> Iterator[Finding]:
        """Separate what only some ranks train from what no rank trains."""
        if view.parted:
            names = tuple(view.parted)
            ranks = RankSet(r for r, never in view.never.items() if set(names) & set(never))
            having = view.parted[names[0]]
            yield self._finding(
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
            yield self._finding(
                view,
                names,
                ranks,
                f"{first_and_more(names)} of {view.optimizer} had no gradient at any of the "
                f"{view.num_samples} sampled steps on {ranks.phrase()}",
                Grade.NOTE,
            )

    def _finding(
        self,
        view: UntrainedView,
        names: tuple[str, ...],
        ranks: RankSet,
        message: str,
        grade: Grade,
    ) -> Finding:
        summary = f"`grad` was None at {view.num_samples} steps: {', '.join(names[:5])}"
        return self.finding(
            message,
            ranks=ranks,
            location=user_location(view.sites[min(ranks)].frames),
            subjects=names,
            grade=grade,
            confidence=0.8,
            evidence=summary,
        )
