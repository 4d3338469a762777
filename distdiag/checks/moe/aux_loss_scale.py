"""MOE009: an auxiliary loss is multiplied with the rest of a loss that was divided beforehand."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile

from distdiag.checks.base import Check
from distdiag.checks.shared.loss_weights import (
    is_close,
    known_windows,
    location_of_pass,
    total_weight,
)
from distdiag.events.losses import AuxTerm, Factor, LossPass
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.losses import AuxLossView, CombinedAuxLossView, LossView, LossWindow


@dataclass(frozen=True, slots=True)
class AuxScale:
    """An auxiliary loss weighs `times` as much as its coefficient says.

    It is too heavy by the number of ranks, of passes, or both; the other one is 1.
    """

    layer: str
    num_ranks: int
    num_passes: int
    is_sure: bool

    @property
    def times(self) -> int:
        """How much too heavy it is."""
        return self.num_ranks * self.num_passes


def aux_scale_of(window: LossWindow) -> AuxScale | None:
    """Return the first auxiliary loss of a step that is too heavy for a known reason."""
    passes = [each for _, each in window.passes() if each.num_counted]
    numbers = {len(each.aux) for each in passes}
    if len(numbers) != 1 or not window.num_passes or not total_weight(window):
        return None
    for place in range(numbers.pop()):
        found = _scale(window, [(each, each.aux[place]) for each in passes])
        if found is not None:
            return found
    return None


def _scale(window: LossWindow, terms: list[tuple[LossPass, AuxTerm]]) -> AuxScale | None:
    num_passes, divisor = window.num_passes, window.divisor
    num_ranks = len(window.by_rank)
    counts = {num_passes, num_ranks, num_passes * num_ranks} - {1}
    whole = sum(_weight(aux, counts) for _, aux in terms) / divisor
    ratio = whole / total_weight(window)
    is_by_ranks = divisor > 1 and all(_has_outer(aux, divisor) for _, aux in terms)
    by_ranks = num_ranks if is_by_ranks and divisor == num_ranks else 1
    by_passes = num_passes if _is_main_divided(window) else 1
    ways = [(by_ranks, by_passes), (by_ranks, 1), (1, by_passes)]
    fitting = [way for way in ways if math.prod(way) > 1 and is_close(ratio, math.prod(way))]
    if not fitting:
        return None
    declared = next(iter(window.by_rank.values())).aux_coefficient
    coefficients = [_coefficient(aux) for _, aux in terms]
    if any(_is_divided(each, declared, counts) for each in coefficients):
        return None
    is_known = all(is_close(each, 1.0) or is_close(each, declared) for each in coefficients)
    is_sure = is_known and all(aux.is_own_mean for _, aux in terms)
    return AuxScale(terms[0][1].layer, *fitting[0], is_sure)


def _product(factors: Iterable[Factor]) -> float:
    return math.prod(f.value if f.op == "*" else 1 / f.value for f in factors if f.value)


def _weight(aux: AuxTerm, counts: Iterable[int]) -> float:
    """Return by what an auxiliary loss is multiplied, its coefficient and constants left out.

    A mean over several auxiliary losses, such as those of layers, is such a constant.
    """
    inner = aux.factors[aux.num_outer :]
    divisions = [f for f in inner if f.op == "/" and any(is_close(f.value, n) for n in counts)]
    return _product(aux.factors[: aux.num_outer]) * _product(divisions)


def _coefficient(aux: AuxTerm) -> float:
    return _product(f for f in aux.factors[aux.num_outer :] if f.value % 1)


def _is_divided(value: float, declared: float, counts: Iterable[int]) -> bool:
    """Say whether a coefficient is known to be divided by ranks or micro-steps beforehand."""
    if is_close(value, declared):
        return False
    return any(is_close(value * n, whole) for n in counts for whole in (1.0, declared))


def _has_outer(aux: AuxTerm, number: float) -> bool:
    return any(f.op == "*" and f.value == number for f in aux.factors[: aux.num_outer])


def _is_main_divided(window: LossWindow) -> bool:
    """Say whether the rest of the loss is divided for all passes before they are added up."""
    if window.num_passes < 2:
        return False
    by_rank: dict[int, list[float]] = {}
    for rank, each in window.passes():
        if each.num_counted:
            outer = each.factors[: each.aux[0].num_outer]
            by_rank.setdefault(rank, []).append(each.mass / _product(outer))
    masses = [mass for each in by_rank.values() for mass in each]
    if all(is_close(mass, 1.0) for mass in masses):
        return False
    sums = [sum(each) for each in by_rank.values()]
    whole = sum(sums)
    is_of_ranks = all(is_close(each, 1.0) for each in sums)
    return is_of_ranks or is_close(whole, 1.0) or is_close(whole, window.divisor)


class AuxLossScale(Check[AuxLossView | CombinedAuxLossView]):
    """An auxiliary (load-balancing) loss grows with the number of ranks or micro-steps.

    ## What you see
    In large jobs the auxiliary loss outweighs the rest of the loss, and results depend on the
    number of ranks and micro-steps. The auxiliary loss is a mean over the tokens of one rank and
    micro-step, but it is multiplied or added up as if it were divided by a count over all of them.

    ## Example
        # wrong: both terms are multiplied to undo the average over ranks
        loss = (token_loss.sum() / num_tokens_of_all_ranks + 0.01 * aux_loss) * world_size
        # right
        loss = token_loss.sum() / num_tokens_of_all_ranks * world_size
        loss = loss + 0.01 * aux_loss / num_micro_steps

    ## How to fix
    Divide the auxiliary loss by the number of micro-steps (`aux_loss / num_micro_steps`), and
    multiply by the number of ranks only the part of the loss that was divided by a count over all
    ranks.

    Changes: The gradient of the routers, and how evenly tokens spread over experts.

    Leaves: A coefficient that was tuned with the large auxiliary loss: it will be too low.

    ## When it is not a defect
    The coefficient in the loss was divided by that number beforehand.

    The loss graph shows only the result of such a division. Declare the whole coefficient in
    `distdiag.toml`; without it this is a note:

        [aux_loss]
        coefficient = 0.01

    To silence it, set `ignore = ["MOE009"]`.

    ## References
    - https://github.com/huggingface/transformers/issues/48706
    - https://github.com/NVIDIA-NeMo/Automodel/issues/3359
    """

    code = "MOE009"
    name = "aux-loss-scale"
    severity = Severity.WARNING

    def check(self, view: AuxLossView | CombinedAuxLossView) -> Iterator[Finding]:
        """Look for the same factor in all steps."""
        if isinstance(view, CombinedAuxLossView) and not view.is_measured:
            return  # it has been judged as an AuxLossView
        windows = [w for w in known_windows(view) if any(p.aux for _, p in w.passes())]
        windows = list(dropwhile(_is_begun_late, windows))
        found = {aux_scale_of(part) for window in windows for part in _parts(window, view)}
        if len(found) != 1 or (scale := found.pop()) is None:
            return
        window = windows[-1]
        # Without a declared coefficient, the one in the graph may be a part of the whole one.
        is_sure = scale.is_sure and len(windows) > 1
        yield self.finding(
            f"the auxiliary loss of {scale.layer or 'the model'} in step {window.step} weighs "
            f"{scale.times} times as much as its coefficient says: {_reason(scale)}",
            ranks=view.ranks,
            step=window.step,
            location=location_of_pass(view),
            subjects=(scale.layer,) if scale.layer else (),
            grade=Grade.LIKELY if is_sure else Grade.NOTE,
            confidence=0.85 if is_sure else 0.4,
            evidence=_evidence(window),
        )


def _is_begun_late(window: LossWindow) -> bool:
    """Say whether routers were not known yet in the first of the passes of a step."""
    return not all(each.aux for _, each in window.passes() if each.num_counted)


def _parts(window: LossWindow, view: LossView) -> list[LossWindow]:
    """Return what can be judged: each rank alone if it is not known how gradients are combined."""
    return [window] if view.has_wrapper else [window.alone(rank) for rank in window.by_rank]


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
            f"the auxiliary loss: {_phrase(aux.factors)}",
            values={"num_passes": window.num_passes, "num_shared_factors": aux.num_outer},
        ),
    )


def _phrase(factors: tuple[Factor, ...]) -> str:
    shown = " ".join(f"{f.op} {f.value:.6g}" for f in factors if f.op in "*/")
    return shown or "no factors"
