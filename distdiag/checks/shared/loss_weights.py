"""How much the elements of a loss weigh in a step: by rank, by backward pass, and together."""

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

from distdiag.events.losses import Factor, LossPass
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Location
from distdiag.views.losses import LossView, LossWindow

EXACT: Final = 1e-3
_CLOSE: Final = 0.01
_DEVIATIONS: Final = 2.0
_MOST_BETWEEN: Final = 2


def is_close(value: float, expected: float, tolerance: float = EXACT) -> bool:
    """Say whether two figures are the same, rounding aside."""
    return abs(value - expected) <= tolerance * abs(expected)


def known_windows(view: LossView) -> list[LossWindow]:
    """Return the steps of whose passes all is known."""
    return [window for window in view.windows if window.num_passes]


def is_per_token(windows: Iterable[LossWindow]) -> bool:
    """Say whether the elements of a loss are tokens, not samples.

    Of tokens, some are left out, or several belong to one row.
    """
    passes = [each for window in windows for _, each in window.passes()]
    if any(each.kind == "dense" for each in passes):
        return False
    if all(each.num_rows == each.num_counted for each in passes):
        return False
    is_ragged = any(each.num_counted < each.num_elements for each in passes)
    return is_ragged or all(0 < each.num_rows < each.num_elements for each in passes)


def own_mean_ratio(window: LossWindow) -> float:
    """Return how many times the heaviest element weighs the lightest one.

    It is 0 unless each pass, or each rank, divides by its own count: its weights add up to the
    same whatever it counts.
    """
    counted = [(rank, each) for rank, each in window.passes() if each.num_counted]
    places = {each.place for _, each in counted}
    ratios = []
    for place in places:
        here = [each for _, each in counted if each.place == place]
        if _are_close([each.mass for each in here]):
            ratios.append(_ratio(each.weight for each in here))
    if len(ratios) == len(places) and ratios:
        return max(ratios)
    by_rank = [[each for r, each in counted if r == rank] for rank in window.by_rank]
    by_rank = [passes for passes in by_rank if passes]
    is_uniform = all(_are_close([each.weight for each in passes]) for passes in by_rank)
    if is_uniform and _are_close([sum(each.mass for each in passes) for passes in by_rank]):
        return _ratio(each.weight for _, each in counted)
    return 0.0


def is_beyond_chance(window: LossWindow) -> bool:
    """Say whether counts differ by more than those of elements that were chosen at random."""
    counts = [each.num_counted for _, each in window.passes() if each.num_counted]
    return max(counts) - min(counts) > _DEVIATIONS * math.sqrt(max(counts))


def _are_close(values: Sequence[float]) -> bool:
    return bool(values) and max(values) - min(values) <= _CLOSE * max(values)


def _ratio(weights: Iterable[float]) -> float:
    positive = [weight for weight in weights if weight > 0]
    return max(positive) / min(positive) if positive else 0.0


def total_weight(window: LossWindow) -> float:
    """Return what all elements of a step weigh together, 0 where the divisor is not known."""
    if not window.divisor:
        return 0.0
    return sum(each.mass for _, each in window.passes()) / window.divisor


def own_factors(each: LossPass) -> list[Factor]:
    """Return the factors of a pass without those of one and the division by its own count."""
    factors = [f for f in each.factors if f.op != "mean" and not is_close(f.value, 1.0, 1e-9)]
    for factor in factors:
        if factor.op == "/" and factor.value == each.num_counted and each.reduction != "mean":
            factors.remove(factor)
            break
    return factors


def divides_by(factor: Factor, value: float) -> bool:
    """Say whether a factor is a division by this number."""
    if factor.num_terms > 1 and is_close(factor.num_terms, value):
        return False  # the mean of so many losses
    return factor.op == "/" and is_close(factor.value, value, 1e-6)


def num_counted(passes: Iterable[LossPass]) -> int:
    """Return how many elements count in all of these passes."""
    return sum(each.num_counted for each in passes)


def location_of_pass(view: LossView) -> Location | None:
    """Return the line from which the last pass was started."""
    event = next(iter(view.windows[-1].by_rank.values()))
    return user_location(event.site.frames)


def is_in_own_loop(view: LossView) -> bool:
    """Say whether the user's code started the passes, not a framework that runs the loop for it."""
    event = next(iter(view.windows[-1].by_rank.values()))
    before = takewhile(lambda frame: not frame.user, event.site.frames)
    return sum("/torch/" not in frame.file for frame in before) <= _MOST_BETWEEN


def evidence_of(window: LossWindow) -> tuple[Evidence, ...]:
    """Show the counts and weights of each rank in one step."""
    return tuple(
        Evidence(
            ranks=RankSet([rank]),
            summary=f"in step {window.step}: " + _passes_phrase(window.of(rank)),
            values={
                "num_counted": num_counted(window.of(rank)),
                "greatest_weight": max(each.weight for each in window.of(rank)),
            },
        )
        for rank in window.by_rank
    )


def _passes_phrase(passes: Sequence[LossPass]) -> str:
    shown = [f"{each.num_counted} elements of weight {each.weight:.4g}" for each in passes[:4]]
    more = f" and {len(passes) - 4} more passes" if len(passes) > 4 else ""
    return ", ".join(shown) + more
