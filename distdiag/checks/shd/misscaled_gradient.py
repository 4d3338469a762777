"""SHD023: gradients are multiplied by a number that does not belong to them."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.loss_weights import is_close, known_windows, total_weight
from distdiag.checks.shared.replicas import first_and_more
from distdiag.checks.shd.partly_reduced_gradient import FEWEST_STEPS, in_words
from distdiag.events.gradients import GradientSums
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.contributions import ALIKE, Contribution, ContributionView
from distdiag.views.experts import is_of_expert
from distdiag.views.losses import LossView

_MOST_LEFT_OUT: Final = 0.5
"""More than this part of the others is no exception, but a way of its own."""


def is_divided_by_scale(found: Contribution, event: GradientSums) -> bool:
    """Say whether gradients are divided by a loss scale by which no loss was multiplied."""
    common = found.common()
    if common is None or common <= 0 or not event.loss_scale > 1:
        return False
    most = len(found.holders) * found.num_passes
    divisor = 1 / (common * event.loss_scale)  # the sum, or the mean over ranks and passes
    is_whole = abs(divisor - round(divisor)) <= ALIKE * divisor and 1 <= round(divisor) <= most
    return is_whole and event.loss_factor * most < event.loss_scale


def odd_factors(view: ContributionView) -> dict[str, float]:
    """Return copies that are so many times as large as all others, by the number of ranks.

    The factor is the same in all sampled steps: the number of ranks, or one by it.
    """
    factors: dict[str, set[float]] = {}
    steps = view.by_step()
    for contributions in steps.values():
        for found in contributions:
            odd = {each.name: _whole(found, each.factor) for each in found.outliers}
            for name, factor in odd.items():
                factors.setdefault(name, set()).add(factor)
            for name in found.names:
                factors.setdefault(name, set()).add(1.0)
    odd_ones = {
        name: next(iter(found))
        for name, found in factors.items()
        if len(found) == 1 and not found & {0.0, 1.0}
    }
    plain = sum(found == {1.0} for found in factors.values())
    is_exception = len(odd_ones) <= _MOST_LEFT_OUT * plain
    return odd_ones if is_exception and len(steps) >= FEWEST_STEPS else {}


def _whole(found: Contribution, factor: float | None) -> float:
    """Return a factor that the number of ranks explains; 0.0 if it does not."""
    number = float(len(found.holders))
    if factor is None or found.common() is None:
        return 0.0
    return next((f for f in (number, 1 / number) if abs(factor - f) <= ALIKE * f), 0.0)


class MisscaledGradient(Check[ContributionView | LossView]):
    """Gradients are multiplied by a number that does not belong to them.

    ## What you see
    The model, or some of its parameters, trains at a different rate than the optimizer was given,
    because its gradients are multiplied by a factor that does not belong there. With Adam the loss
    hides it, but clipping, weight decay and the gradient norm are wrong; with SGD the model learns
    nothing, or diverges.

    ## Example
        dist.all_reduce(model.embed.weight.grad)  # wrong: DDP has averaged it already
        optimizer.step()                          # right: without that line

    ## How to fix
    Average each gradient over all ranks exactly once. Call `scaler.unscale_(optimizer)`, or divide
    by a loss scale, only if the loss was multiplied by it (`scaler.scale(loss).backward()`).

    Changes: The size of these gradients, and what is clipped.

    Leaves: The gradients of all other parameters.

    ## When it is not a defect
    These parameters are intended to train at a rate that differs by this factor.

    If so, add `ignore = ["SHD023"]` to `distdiag.toml`.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/issues/7839
    - https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """

    code = "SHD023"
    name = "misscaled-gradient"
    severity = Severity.ERROR

    def check(self, view: ContributionView | LossView) -> Iterator[Finding]:
        """Judge the vector of all parameters, and those that do not share it."""
        if isinstance(view, LossView):
            yield from self._summed_twice(view)
            return
        yield from self._divided(view)
        yield from self._odd(view)

    def _summed_twice(self, view: LossView) -> Iterator[Finding]:
        if len(view.resummed) < FEWEST_STEPS:
            return
        weights = [total_weight(window) for window in known_windows(view)]
        known = [weight for weight in weights if weight]
        if not all(is_close(weight, 1.0) for weight in known):
            return  # the loss may be made for it
        first = min(view.resummed)
        number = len(view.ranks)
        summary = (
            f"between the backward pass and step {first} the gradients were all-reduced by a sum, "
            f"and became {number} times as large"
        )
        yield self.finding(
            f"the gradients of {view.ranks.phrase()} are reduced twice: the wrapper has averaged "
            f"them in the backward pass, and the program adds up these {number} equal copies, so "
            f"that they are {number} times larger than the mean",
            ranks=view.ranks,
            step=first,
            location=user_location(view.sum_site.frames) if view.sum_site is not None else None,
            severity=None if known else Severity.WARNING,
            grade=Grade.LIKELY,
            confidence=0.95 if known else 0.7,
            evidence=(Evidence(ranks=view.ranks, summary=summary),),
        )

    def _divided(self, view: ContributionView) -> Iterator[Finding]:
        event = view.events[min(view.events)]
        found = [each for each in view.found if is_divided_by_scale(each, event)]
        if len({each.step for each in found}) < FEWEST_STEPS:
            return
        first = found[0]
        yield self.finding(
            f"the gradients of {first_and_more(first.names)} of {view.model} are divided by the "
            f"loss scale {event.loss_scale:g}, but the loss was not multiplied by it",
            ranks=RankSet(rank for each in found for rank in each.ranks),
            step=first.step,
            location=user_location(view.site.frames),
            subjects=first.names,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=tuple(
                Evidence(ranks=RankSet(each.ranks), summary=in_words(each)) for each in found[:2]
            ),
        )

    def _odd(self, view: ContributionView) -> Iterator[Finding]:
        odd = {
            name: factor
            for name, factor in odd_factors(view).items()
            if name in view.copies and not (name in view.plans and is_of_expert(view.plans[name]))
        }
        for factor in sorted(set(odd.values())):
            names = tuple(name for name, value in odd.items() if value == factor)
            first = next(e for e in view.found if any(o.name in names for o in e.outliers))
            size = f"{factor:g} times larger" if factor > 1 else f"{1 / factor:g} times smaller"
            yield self.finding(
                f"the gradient of {first_and_more(names)} of {view.model} from "
                f"{RankSet(first.holders).phrase()} is applied {size} than those of "
                f"{len(first.names)} other parameters",
                ranks=RankSet(first.holders),
                step=first.step,
                location=user_location(view.site.frames),
                subjects=names,
                severity=Severity.WARNING,
                grade=Grade.LIKELY,
                confidence=0.8,
                evidence=(Evidence(ranks=RankSet(first.ranks), summary=in_words(first)),),
            )
