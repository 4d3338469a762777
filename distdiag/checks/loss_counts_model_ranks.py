"""PAR013: a loss is multiplied by a number of ranks over which its gradients are not averaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distdiag.checks.base import Check
from distdiag.finding import Finding, Grade, Severity
from distdiag.loss_event import LossWeights
from distdiag.loss_view import LossView, LossWindow
from distdiag.ranks import RankSet
from distdiag.reasoning.loss_excess import Excess, excess_of
from distdiag.reasoning.loss_weights import evidence_of, known_windows, location_of_pass
from distdiag.reasoning.rank_factors import is_number_of_ranks


class LossCountsModelRanks(Check):
    """A loss is multiplied by a number of ranks over which its gradients are not averaged.

    ## What it detects
    The weights of all elements of a step, over all ranks whose gradients are combined, add up to a
    whole number instead of 1. The loss holds a factor that explains it: the size of a process group
    (of all ranks, or of those that share a sequence or a model) over which the gradients are not
    averaged. Or each rank takes the mean over its own part of a sequence that ranks share, and all
    means are added up. How gradients are combined is told by the wrapper of the model or, without
    one, by the gradients before and after. Then a factor that may be a weight of the loss, in a
    program of which no ranks share sequences, is a note; and so is, always, a factor that the
    program gives as a floating-point number, or of which its source does not show that it counts
    ranks.

    ## Why it matters
    The gradient grows with the number of ranks that only share the work on a model. Clipping,
    weight decay and the learning rate mean something else in each layout.

    ## Example
    `loss * dist.get_world_size()`, to undo an average over ranks, where tensor parallelism leaves
    only a half of the ranks for data parallelism.

    ## How to fix
    Multiply by the number of ranks over which gradients are averaged, such as `mesh["dp"].size()`.
    Divide gradients by the ranks that share a sequence, too, if each has a mean of its own.

    ## References
    - huggingface/transformers#39648
    - NVIDIA/Megatron-LM#906
    - deepspeedai/DeepSpeed#5248
    """

    code = "PAR013"
    name = "loss-counts-model-ranks"
    severity = Severity.WARNING
    needs = (LossWeights,)

    why = (
        "A factor undoes an average only if it is the number of ranks that average, and only an "
        "average of means is a mean."
    )
    fix = (
        "Multiply the loss by the size of the group over which gradients are averaged, and average "
        "gradients of means over all ranks."
    )
    fix_changes = "The size of the gradient, and so what clipping and the learning rate do."
    fix_leaves = "Learning rates that were tuned with the large gradient: they are too low then."
    disproof = "The factor is a weight of the loss that has nothing to do with ranks."

    def check_losses(self, view: LossView) -> Iterator[Finding]:
        """Look for the same factor in all steps."""
        yield from self._found(view)

    def _found(self, view: LossView) -> Iterator[Finding]:
        windows = [w for w in known_windows(view) if any(p.num_counted for _, p in w.passes())]
        found = {excess_of(window, view.sequences) for window in windows}
        if len(found) != 1 or not view.is_told or view.is_multiplied:
            return
        excess = found.pop()
        if excess is None or any(abs(each * excess.times - 1) < 1e-3 for each in view.scalings):
            return
        is_sure = len(windows) > 1 and excess.is_sure and not _may_be_meant(excess, view)
        is_sure = is_sure and _is_counted(excess, windows[-1])
        window = windows[-1]
        yield self.finding(
            f"the loss behind step {window.step} {_what(excess, view)}: its elements weigh "
            f"{excess.times} together, not 1",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=evidence_of(window),
        )

    def check_combined_losses(self, view: LossView) -> Iterator[Finding]:
        """Look the same way where gradients are combined by hand, or ranks share sequences."""
        alone = replace(view, sequences=())
        if view.is_measured or not any(each.grade is Grade.LIKELY for each in self._found(alone)):
            yield from self._found(view)


def _may_be_meant(excess: Excess, view: LossView) -> bool:
    """Say whether a program of plain data parallelism adds up a loss with a weight of its own."""
    is_summed = len(view.ranks) > excess.divisor
    is_shared = any(len(each.ranks) == excess.factor for each in view.sequences)
    is_plain = is_summed and len(view.ranks) == excess.factor and not is_shared
    return view.is_measured and is_plain


def _is_counted(excess: Excess, window: LossWindow) -> bool:
    """Say whether the program is seen to multiply by a number of ranks, if there is a factor."""
    frames = [frame for event in window.by_rank.values() for frame in event.site.frames]
    return not excess.factor or is_number_of_ranks(dict.fromkeys(frames), excess.factor)


def _what(excess: Excess, view: LossView) -> str:
    combined = f"gradients of {view.ranks.phrase()} are added up"
    if len(view.ranks) == 1:
        combined = f"gradients are those of {view.ranks.phrase()} alone"
    if excess.divisor > 1:
        combined = f"{combined} and divided by {excess.divisor:g}"
    if excess.sharing:
        sharing = RankSet(excess.sharing).phrase()
        own = "is a mean over each rank's own part of a sequence"
        return f"{own} that {sharing} share, but the {combined}"
    if not excess.factor:
        return f"is a mean of each rank's own, and the {combined}"
    return f"is multiplied by {excess.factor:g}, the number of {excess.of}, but the {combined}"
