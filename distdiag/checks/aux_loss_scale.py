"""MOE009: a balancing loss is multiplied with the rest of a loss that was divided beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import dropwhile

from distdiag.checks.base import Check
from distdiag.event import Event
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.loss_event import Factor, LossWeights
from distdiag.loss_view import LossView, LossWindow
from distdiag.ranks import RankSet
from distdiag.reasoning.aux_scale import AuxScale, aux_scale_of
from distdiag.reasoning.loss_weights import known_windows, location_of_pass


class AuxLossScale(Check):
    """A balancing loss of routers grows with the number of ranks or micro-steps.

    ## What it detects
    A loss over tokens is divided by the number of tokens of all ranks, or of all micro-steps. A
    balancing loss that is added to it is a mean over the tokens of one rank and micro-step. Then
    both are multiplied by the number of ranks, to undo an average; or the balancing loss is added
    in each micro-step, or a function of the program injects it there with a gradient of 1, and only
    the other one is divided by their number. The latter is told of each rank by itself, too, where
    nothing tells how gradients are combined. It is a note where neither modules, settings nor the
    source name the number a coefficient, or they name one of which it may be a part.

    ## Why it matters
    The balancing loss weighs as many times as much as its coefficient says, and outweighs the rest
    in large jobs. The results depend on the number of ranks and micro-steps.

    ## Example
    `loss = (token_loss.sum() / num_tokens_of_all_ranks + coef * aux_loss) * world_size`.

    ## How to fix
    Multiply the loss over tokens alone, and divide the balancing loss by the number of micro-steps.

    ## References
    - huggingface/transformers#48706
    - NVIDIA-NeMo/Automodel#3359
    """

    code = "MOE009"
    name = "aux-loss-scale"
    severity = Severity.WARNING
    needs = (LossWeights,)

    why = "A mean over a rank's own tokens needs no factor where gradients are averaged over ranks."
    fix = (
        "Multiply only what was divided by a count over all ranks, and divide the balancing loss "
        "by the number of micro-steps."
    )
    fix_changes = "The gradient of the routers, and how evenly tokens spread over experts."
    fix_leaves = "A coefficient that was tuned with the heavy balancing loss: it is too low then."
    disproof = "The coefficient was divided by that number beforehand."
    absent = "no balancing loss was seen in a loss"

    def concerns(self, event: Event) -> bool:
        """Look for losses with a balancing loss."""
        return isinstance(event, LossWeights) and any(p.aux for p in event.passes if p is not None)

    def check_losses(self, view: LossView) -> Iterator[Finding]:
        """Look for the same factor in all steps."""
        windows = [w for w in known_windows(view) if any(p.aux for _, p in w.passes())]
        windows = list(dropwhile(_is_begun_late, windows))
        found = {aux_scale_of(part) for window in windows for part in _parts(window, view)}
        if len(found) != 1 or (scale := found.pop()) is None:
            return
        window = windows[-1]
        is_sure = scale.is_sure and len(windows) > 1
        yield self.finding(
            f"the balancing loss of {scale.layer or 'the model'} behind step {window.step} weighs "
            f"{scale.times} times as much as its coefficient says: {_reason(scale)}",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            subjects=(scale.layer,) if scale.layer else (),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=_evidence(window),
        )

    def check_combined_losses(self, view: LossView) -> Iterator[Finding]:
        """Look the same way where gradients are combined by hand."""
        if view.is_measured:
            yield from self.check_losses(view)


def _is_begun_late(window: LossWindow) -> bool:
    """Say whether routers were not known yet in the first of the passes of a step."""
    return not all(each.aux for _, each in window.passes() if each.num_counted)


def _parts(window: LossWindow, view: LossView) -> list[LossWindow]:
    """Return what can be judged: each rank alone if nothing tells how gradients are combined."""
    return [window] if view.is_told else [window.alone(rank) for rank in window.by_rank]


def _reason(scale: AuxScale) -> str:
    reasons = []
    if scale.num_ranks > 1:
        reasons.append(
            f"it is multiplied by {scale.num_ranks} to undo the average over ranks, as the rest of "
            "the loss must be, but is a mean over each rank's own tokens"
        )
    if scale.num_passes > 1:
        reasons.append(
            f"it is added in each of {scale.num_passes} micro-steps and not divided by them, as "
            "the rest of the loss is"
        )
    return "; ".join(reasons)


def _evidence(window: LossWindow) -> tuple[Evidence, ...]:
    rank, each = next((rank, each) for rank, each in window.passes() if each.aux)
    aux = each.aux[0]
    return (
        Evidence(
            ranks=RankSet([rank]),
            summary=f"from the root on, the loss over tokens: {_phrase(each.factors)}; "
            f"the balancing loss: {_phrase(aux.factors)}",
            values={"num_passes": window.num_passes, "num_shared_factors": aux.num_outer},
        ),
    )


def _phrase(factors: tuple[Factor, ...]) -> str:
    shown = " ".join(f"{f.op} {f.value:.6g}" for f in factors if f.op in "*/")
    return shown or "no factors"
