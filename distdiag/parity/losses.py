"""What backward was called on in two runs: one number for each pass and data coordinate."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.explanations import Pair
from distdiag.parity.rank_files import Array
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.tolerance import Common, Exactness, Measured, difference_of, measure
from distdiag.record.recording import Kind

# Which part of a loss differs: that which reaches the parameters whose gradients differ.


class Share(NamedTuple):
    """The gradients that differ, in backward order, and what they tell of the loss."""

    differing: tuple[Difference, ...]
    explanation: str


def share_of(gradients: Sequence[Difference]) -> Share | None:
    """Tell the part of the loss that is weighed otherwise; None if it may be all of it.

    What an auxiliary loss of a router adds reaches the router and what lies before it, and
    nothing behind it.
    """
    differing = tuple(each for each in gradients if each.ratio > 1)
    agreeing = [each.name for each in gradients if each.ratio <= 1 and each.bound > 0]
    if not differing or not agreeing:
        return None
    named = [name.partition("/")[2] or name for name in (differing[0].name, agreeing[0])]
    return Share(
        differing,
        f"only a part of it is weighed otherwise, one that reaches {named[0]}, the first of "
        f"{len(differing)} parameters in backward order whose gradients differ, and not "
        f"the {len(agreeing)} whose gradients agree, such as {named[1]}",
    )


# Compares the losses of two runs, pass by pass.

_FIRST_STEPS: Final = 4


def total_loss(run: RecordedRun, step: int, num_micro: int) -> float:
    """Return the loss of a step: the mean over coordinates, summed over passes."""
    losses = (_losses(run, step, micro) for micro in range(num_micro))
    return sum(float(each.mean()) for each in losses if each.size)


def loss_pairs(
    reference: RecordedRun, repeats: Sequence[RecordedRun], candidate: RecordedRun, step: int
) -> Iterator[Pair]:
    """Yield the losses of all passes of a step; those of unlike numbers of passes together."""
    common = _noise(reference, repeats, step)
    if reference.num_micro(step) != candidate.num_micro(step):
        yield from _step_pairs(reference, repeats, candidate, step, common)
        return
    for micro in range(reference.num_micro(step)):
        ours = _losses(reference, step, micro)
        sums = {tuple(_losses(candidate, step, micro, join=join)) for join in (np.mean, np.sum)}
        if not ours.size or () in sums:
            continue
        found = []
        for value in {float(total) for each in sums for total in (np.mean(each), np.sum(each))}:
            measured = _measured(reference, repeats, value, step, micro)
            if measured is not None:
                pair = np.array([ours.mean()]), np.array([value])
                found.append(Pair(difference_of(measured, common), *pair))
        # Whether losses are averaged or summed over ranks, the gradients will show.
        if found:
            yield min(found, key=lambda pair: pair.difference.ratio)


def _step_pairs(
    reference: RecordedRun,
    repeats: Sequence[RecordedRun],
    candidate: RecordedRun,
    step: int,
    common: Common,
) -> Iterator[Pair]:
    """Yield the loss of a whole step, whether its passes are summed or averaged."""
    ours, theirs, *others = (_passes(run, step) for run in (reference, candidate, *repeats))
    if not ours.size or not theirs.size or any(not each.size for each in others):
        return
    exactness = Exactness(2 * reference.unit(Kind.LOSS, step, "loss"), num_steps=step)
    share, found = len(theirs) / len(ours), []
    for scale in (1, len(theirs[0]), share, share * len(theirs[0])):
        value, due = np.array([theirs.mean() * scale]), np.array([ours.mean()])
        means = [np.array([each.mean()]) for each in others]
        measured = measure("loss of the step", due, value, means, exactness)
        if measured is not None:
            found.append(Pair(difference_of(measured, common), due, value))
    if found:
        yield min(found, key=lambda pair: pair.difference.ratio)


def _passes(run: RecordedRun, step: int) -> Array:
    """Return the losses of a step by pass and coordinate, nothing if some are missing."""
    rows = [_losses(run, step, micro) for micro in range(run.num_micro(step))]
    return np.stack(rows) if len({len(row) for row in rows}) == 1 else np.empty((0, 0))


def _losses(
    run: RecordedRun, step: int, micro: int, *, join: Callable[[list[float]], Any] = np.mean
) -> Array:
    """Return the losses of all data coordinates in one pass.

    Ranks of one coordinate have the same loss, or each that of its part of the data.
    """
    records = run.by_rank(Kind.LOSS, step, micro, "loss")
    losses = []
    for ranks in run.coordinates:
        values = [records[rank].values for rank in ranks if rank in records]
        own = [float(value[0]) for value in values if value]  # type: ignore[arg-type]
        has_parts = len(own) > 1 and run.unlike_losses(ranks)
        losses += [float(join(own)) if has_parts else own[0]] if own else []
    return np.array(losses, dtype=np.float64)


def _measured(
    reference: RecordedRun, repeats: Sequence[RecordedRun], value: float, step: int, micro: int
) -> Measured | None:
    ours, *others = (_losses(run, step, micro) for run in (reference, *repeats))
    if not ours.size or any(not each.size for each in others):
        return None
    means = [np.array([each.mean()]) for each in others]
    unit = 2 * reference.unit(Kind.LOSS, step, "loss")
    # One number has the whole perturbation as its bound, whatever it was computed in.
    exactness = Exactness(unit, num_steps=step)
    name = f"loss of pass {micro + 1}"
    return measure(name, np.array([ours.mean()]), np.array([value]), means, exactness)


def _noise(reference: RecordedRun, repeats: Sequence[RecordedRun], step: int) -> Common:
    """Return the most that rounding did to a loss up to this step, and soon after.

    The loss of one pass is one number: by chance it may be the same in the repeats.
    """
    num_steps = min(run.num_steps for run in (reference, *repeats))
    found = [
        _measured(reference, repeats, math.nan, each, micro)
        for each in range(min(max(step + 1, _FIRST_STEPS), num_steps))
        for micro in range(reference.num_micro(each))
    ]
    return Common(max((each.noise for each in found if each is not None), default=0.0))
