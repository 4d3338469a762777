"""Why two runs differ: a factor, a sign, an order, or data that enters with another weight."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.rank_files import Array
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind

_CLOSE: Final = 5e-3
_MOST_SHARDS: Final = 8
_FIT: Final = 0.02


class Pair(NamedTuple):
    """A quantity of both runs, with what was measured of it. Too large a one has no values."""

    difference: Difference
    reference: Array
    candidate: Array


class Explanation(NamedTuple):
    """How values come from those of the reference, and what to change; empty if nothing fits."""

    text: str = ""
    fix: str = ""
    parts: tuple[float, ...] = ()
    """Where the parts begin that alone differ, as shares of the first dimension."""


NOTHING: Final = Explanation()
_TOO_LARGE: Final = (
    "Find what is summed over {} where a mean is due, or multiplied by their number, and divide by "
    "it once."
)
_TOO_SMALL: Final = (
    "Find what is divided by {} a second time (a mean of means, a loss that was divided already), "
    "and divide once."
)


def explain(pairs: Sequence[Pair], sizes: Mapping[str, int]) -> Explanation:
    """Say how the candidate's values come from the reference's.

    `sizes` are the numbers that may stand behind a factor, by what they count.
    """
    factor = common_factor(pairs)
    if factor is not None:
        named = _named(factor, sizes)
        if named.text or any(pair.reference.size != 1 for pair in pairs):
            text = f"{_subject(pairs)} {factor:.5g} times as large{named.text}"
            return Explanation(text, named.fix)
        return NOTHING  # of a single number, any other one is a multiple
    return _of_parts(pairs[0], sizes) or Explanation(_offset(pairs[0]))


def is_multiple(pairs: Sequence[Pair], sizes: Mapping[str, int]) -> bool:
    """Say whether all are larger or smaller by one of these numbers."""
    factor = common_factor(pairs)
    return factor is not None and factor > 0 and bool(_named(factor, sizes).text)


def _subject(pairs: Sequence[Pair]) -> str:
    return "it is" if len(pairs) == 1 else f"all {len(pairs)} are"


def common_factor(pairs: Sequence[Pair]) -> float | None:
    """Return the one factor between both runs, None if it is not one."""
    factors = [pair.difference.factor for pair in pairs if math.isfinite(pair.difference.factor)]
    if not factors or len(factors) < len(pairs):
        return None
    middle = statistics.median(factors)
    if middle == 0 or not all(_is_scaled(pair, middle) for pair in pairs):
        return None
    return middle


def _is_scaled(pair: Pair, factor: float) -> bool:
    if not pair.reference.size:
        # The same as below, relative to the reference, from what was measured.
        moved, best, away = pair.difference.measured, pair.difference.factor, 1 - factor
        rest = math.sqrt(max(moved**2 + 2 * away * (best - 1) + away**2, 0.0))
        return rest <= max(0.2 * moved, 1e-6 * abs(factor)) and rest <= 0.05 * abs(factor)
    size = abs(factor) * float(np.linalg.norm(pair.reference))
    rest = float(np.linalg.norm(pair.candidate - factor * pair.reference))
    moved = float(np.linalg.norm(pair.candidate - pair.reference))
    return size > 0 and rest <= max(0.2 * moved, 1e-6 * size) and rest <= 0.05 * size


def _named(factor: float, sizes: Mapping[str, int]) -> Explanation:
    if abs(factor + 1) < _CLOSE:
        return Explanation(": the sign is turned round", "Turn the sign back.")
    forms = (
        (lambda k: float(k), "times {}", _TOO_LARGE),
        (lambda k: 1 / k, "divided by {}", _TOO_SMALL),
        (math.sqrt, "times the square root of {}", ""),
        (lambda k: 1 / math.sqrt(k), "divided by the square root of {}", ""),
    )
    for form, words, fix in forms:
        names = [
            f"{name} ({size})"
            for name, size in sizes.items()
            if size > 1 and abs(factor / form(size) - 1) < _CLOSE
        ]
        if names:
            listed = " or ".join(names)
            return Explanation(f": {words.format(listed)}", fix.format(listed))
    return NOTHING


def _of_parts(pair: Pair, sizes: Mapping[str, int]) -> Explanation | None:
    """Find parts along the first dimension that stand in another order, or alone differ."""
    reference, candidate = pair.reference, pair.candidate
    if not reference.ndim or not reference.size:
        return None
    counts = sorted({size for size in sizes.values() if 1 < size <= _MOST_SHARDS})
    for count in counts:
        if reference.shape[0] % count:
            continue
        ours, theirs = np.split(reference, count), np.split(candidate, count)
        order = [_same_block(block, ours) for block in theirs]
        if None not in order and order != list(range(count)):
            listed = ", ".join(str(place) for place in order)
            text = f"its {count} parts along dimension 0 stand in another order: {listed}"
            return Explanation(
                text, "Put the parts together in the order in which they were dealt out."
            )
        allowed = pair.difference.bound * float(np.linalg.norm(reference))
        apart = [float(np.linalg.norm(a - b)) > allowed for a, b in zip(ours, theirs, strict=True)]
        if any(apart) and not all(apart):
            wrong = [number for number, is_apart in enumerate(apart) if is_apart]
            return _of_some(wrong, count, is_zero=not any(theirs[n].any() for n in wrong))
    return None


def _of_some(wrong: Sequence[int], count: int, *, is_zero: bool) -> Explanation:
    listed = ", ".join(map(str, wrong))
    words = "are all zero: nobody gives them anything" if is_zero else "alone differ"
    return Explanation(
        f"of its {count} parts along dimension 0, those with the numbers {listed} {words}",
        "Let every part have a rank that computes it, and be reduced with the others."
        if is_zero
        else "Look at what the ranks that hold or compute these parts do with them.",
        tuple(number / count for number in wrong),
    )


def _same_block(block: Array, blocks: Iterable[Array]) -> int | None:
    size = float(np.linalg.norm(block))
    for number, other in enumerate(blocks):
        if float(np.linalg.norm(block - other)) <= 1e-3 * size:
            return number
    return None


def _offset(pair: Pair) -> str:
    difference = pair.candidate - pair.reference
    if difference.size < 4:
        return ""
    mean, spread = float(difference.mean()), float(difference.std())
    return f"each element is {mean:.4g} larger" if spread < 0.01 * abs(mean) else ""


ABSENT: Final = (
    "Let the gradients of data coordinate {} be reduced with those of the others. They are lost by "
    "a pass without synchronisation, a group without its ranks, or a loss that nobody calls "
    "backward on."
)


class Weights(NamedTuple):
    """With which weight the data of each coordinate enters a run, and in the reference."""

    candidate: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def absent(self) -> str:
        """The coordinates whose data hardly enters at all."""
        pairs = enumerate(zip(self.candidate, self.reference, strict=True))
        return ", ".join(str(n) for n, (has, due) in pairs if abs(has) < 0.05 * abs(due))

    @property
    def fields(self) -> dict[str, Any]:
        """What a divergence says of them."""
        found = {"explanation": self.phrase(), "weights": self.candidate, "due": self.reference}
        return {**found, "fix": ABSENT.format(self.absent)} if self.absent else found

    def phrase(self) -> str:
        """Say what the weights mean."""
        shares = f"{_list(self.candidate)}; in the reference with {_list(self.reference)}"
        text = f"the data of the coordinates enters with the weights {shares}"
        return (
            f"the data of coordinate {self.absent} does not enter: {text}" if self.absent else text
        )


def _list(weights: Iterable[float]) -> str:
    return ", ".join(f"{round(weight, 4) + 0.0:.4g}" for weight in weights)


def weights_of(pairs: Sequence[Pair], alone: Sequence[Sequence[Array]]) -> Weights | None:
    """Find the weights that make the gradients of both runs out of those of single coordinates.

    `alone` has, for each coordinate, its gradients of the tensors in `pairs`. None if there are no
    such weights.
    """
    parts = [np.concatenate([array.ravel() for array in arrays]) for arrays in alone]
    matrix = np.stack(parts, axis=1)
    found = []
    for runs in ([p.candidate for p in pairs], [p.reference for p in pairs]):
        target = np.concatenate([array.ravel() for array in runs])
        weights, *_ = np.linalg.lstsq(matrix, target, rcond=1e-6)
        rest = float(np.linalg.norm(matrix @ weights - target))
        if rest > _FIT * float(np.linalg.norm(target)):
            return None
        found.append(tuple(float(weight) for weight in weights))
    moved = max(abs(a - b) for a, b in itertools.zip_longest(*found))
    return Weights(*found) if moved > _CLOSE else None


# What the data of each coordinate gives by itself, beside the gradients of the whole run.


def gradients_of(
    pairs: Sequence[Pair], alone: Sequence[RecordedRun]
) -> tuple[list[Pair], list[list[Array]]]:
    """Return the gradients that all runs on the data of one coordinate have, and those of each."""
    kept: list[Pair] = []
    parts: list[list[Array]] = [[] for _ in alone]
    for pair in pairs:
        arrays = [run.whole(Kind.GRADIENT, 0, pair.difference.name) for run in alone]
        known = [array for array in arrays if array is not None]
        if pair.reference.size and len(known) == len(alone):
            kept.append(pair)
            for part, array in zip(parts, known, strict=True):
                part.append(array)
    return kept, parts


def is_mean_of(pairs: Sequence[Pair], parts: Sequence[Sequence[Array]]) -> bool:
    """Say whether the candidate's gradients are the means of those of the coordinates alone.

    As exactly as tells it from the reference's: then each rank computes what it should of its
    batch, and the reference differs since it has all samples in one batch.
    """
    rest = moved = 0.0
    for pair, arrays in zip(pairs, zip(*parts, strict=True), strict=True):
        mean = np.mean(arrays, axis=0)
        rest += float(np.square(pair.candidate - mean).sum())
        moved += float(np.square(pair.candidate - pair.reference).sum())
    return bool(moved) and rest <= _FIT**2 * moved
