"""PAR002: a loss is divided once more than it should be."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.par.loss_counts_model_ranks import is_number_of_ranks
from distdiag.checks.shared.loss_weights import (
    divides_by,
    evidence_of,
    is_close,
    known_windows,
    location_of_pass,
    num_counted,
    own_factors,
    total_weight,
)
from distdiag.events.losses import Factor, LossPass
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.losses import CombinedLossView, LossView, LossWindow

_TWICE: Final = "is divided twice by the {passes} micro-steps of a step"
_AGAIN: Final = (
    "is divided by the number of elements of the whole step, and again by its {passes} micro-steps"
)
_RANKS: Final = (
    "is divided by the number of elements of all {ranks} ranks, but the gradients are also "
    "averaged over these ranks"
)
_SHARE: Final = (
    "is divided by {ranks}, the number of ranks, but the gradients are also averaged over these "
    "ranks"
)


class RepeatedLossDivision(Check[LossView | CombinedLossView]):
    """A loss is divided twice by the number of micro-steps, or again after a global count.

    ## What you see
    The gradient is too small by the number of micro-steps or ranks, so clipping, weight decay and
    the learning rate have a different effect for each size of the job. The loss is divided twice:
    the weights of all elements of a step add up to less than 1.

    ## Example
        accelerator = Accelerator(gradient_accumulation_steps=4)
        # wrong: `backward` divides by 4, too
        accelerator.backward(loss / 4)
        # right
        accelerator.backward(loss)
        # wrong: DDP averages over the ranks, too
        (loss / dist.get_world_size()).backward()
        # right
        loss.backward()

    ## How to fix
    Remove one of the two divisions. Or multiply the loss by the number of ranks over which the
    gradients are averaged.

    Changes: The size of the gradient, and so what clipping and the learning rate do.

    Leaves: Learning rates that were tuned with the small gradient: they will be too high.

    ## When it is not a defect
    The weights of all elements of a step are intended to add up to less than one.

    If so, add `ignore = ["PAR002"]` to `distdiag.toml`. A division by as many as there are ranks is
    a note where the source does not show that the divisor counts ranks.

    ## References
    - https://github.com/huggingface/accelerate/issues/3533
    - https://github.com/huggingface/transformers/issues/35808
    - https://github.com/huggingface/transformers/issues/37474
    """

    code = "PAR002"
    name = "repeated-loss-division"
    severity = Severity.WARNING

    def check(self, view: LossView | CombinedLossView) -> Iterator[Finding]:
        """Look for the same repeated division in all steps."""
        if isinstance(view, CombinedLossView) and not view.is_measured:
            return  # it has been judged as a LossView
        windows = [w for w in known_windows(view) if any(p.num_counted for _, p in w.passes())]
        found = {_found_in(window, view) for window in windows}
        if len(found) != 1 or not (division := found.pop()):
            return
        window = windows[-1]
        is_sure = len(windows) > 1 and not _may_be_half(window)
        if division is _SHARE:
            is_sure = is_sure and _counts_ranks(window)
        number = len(view.ranks) if division in (_RANKS, _SHARE) else window.num_passes
        what = division.format(passes=number, ranks=number)
        yield self.finding(
            f"the loss of step {window.step} {what}: the weights of its elements add up to "
            f"{total_weight(window):.4g}, not 1",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=evidence_of(window),
        )


def _found_in(window: LossWindow, view: LossView) -> str:
    num_passes, total = window.num_passes, total_weight(window)
    if not total or not view.has_wrapper:
        return ""
    found = {_division(rank, each, window) for rank, each in window.passes() if each.num_counted}
    division = found.pop() if len(found) == 1 else ""
    expected = [1 / num_passes, 1 / (num_passes * len(window.by_rank))]
    if division in (_TWICE, _AGAIN) and any(is_close(total, each) for each in expected):
        return division
    if division in (_RANKS, _SHARE) and is_close(total, 1 / len(window.by_rank)):
        return "" if view.is_multiplied else division
    return ""


def _division(rank: int, each: LossPass, window: LossWindow) -> str:
    num_passes, num_ranks = window.num_passes, len(window.by_rank)
    factors = own_factors(each)
    of_steps = [f for f in factors if num_passes > 1 and divides_by(f, num_passes)]
    if len(of_steps) == 2 and len(factors) == 2:
        # If losses are added up in between, the inner one is the share of one of them.
        return _TWICE if factors[0].num_terms == 1 else ""
    if num_passes != num_ranks > 1 and each.reduction == "mean" and len(factors) == 1:
        is_averaged = is_close(window.divisor, num_ranks)
        return _SHARE if is_averaged and divides_by(factors[0], num_ranks) else ""
    of_all = num_counted(p for _, p in window.passes())
    counts = [f for f in factors if f.op == "/" and f.value == of_all]
    if num_ranks > 1 and factors == counts and len(counts) == 1:
        return _RANKS
    counts = counts or [f for f in factors if f.value == num_counted(window.of(rank))]
    rest = [f for f in factors if f not in counts and f not in of_steps[:1]]
    is_left = all(_multiplies_by(f, num_ranks) for f in rest) and len(rest) <= 1
    return _AGAIN if len(counts) == 1 and of_steps and is_left else ""


def _counts_ranks(window: LossWindow) -> bool:
    """Say whether the program is seen to divide by a number of ranks: it may be another two."""
    frames = [frame for event in window.by_rank.values() for frame in event.site.frames]
    return is_number_of_ranks(dict.fromkeys(frames), len(window.by_rank), "/")


def _multiplies_by(factor: Factor, number: int) -> bool:
    return factor.op == "*" and factor.value == number


def _may_be_half(window: LossWindow) -> bool:
    """Say whether one of the divisions may be the half of a squared error."""
    is_dense = any(each.kind == "dense" for _, each in window.passes())
    return window.num_passes == 2 and is_dense
