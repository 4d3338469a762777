"""Shows which gradients differ between ranks that are given the same and compute it together."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from distdiag.engine.losses.sums import KnownModel
from distdiag.events.gradients import GradientSum
from distdiag.views.contributions import ALIKE, COARSE, Array, are_equal
from distdiag.views.gradients import GradientSample, Ranks, SameWorkView

_FEWEST_SAMPLES: Final = 2
_MATRIX: Final = 2
"""Vectors are mostly filled with one number: they began alike though each rank has its own part."""


def same_work_view(model: str, ranks: Ranks, known: KnownModel) -> SameWorkView | None:
    """Return the parameters that began alike, by whether their gradients are the same.

    Those beside parameters that each rank has its own part of may be parts, too.
    """
    samples = [sample for sample in known.samples if sample.by_rank.keys() >= set(ranks)]
    if len(samples) < _FEWEST_SAMPLES:
        return None
    held = {
        name: seen for name in samples[0].named(ranks[0]) if (seen := _on(samples, ranks, name))
    }
    weights = {name: [each.weight for each in seen[0]] for name, seen in held.items()}
    parts = {name.rpartition(".")[0] for name in held if not are_equal(weights[name])}
    beside = tuple(f"{module.rpartition('.')[0] or module}." for module in parts)
    copies = [name for name in held if are_equal(weights[name])]
    # Once others have drifted apart, so do the gradients of these.
    equal = tuple(name for name in copies if _are_equal(held[name][0]))
    apart = tuple(
        name
        for name in copies
        if any(weights[name])
        and all(map(_are_apart, held[name]))
        and not any(are_equal([e.weight for e in seen]) for seen in held[name][1:])
        and len(known.plans[ranks[0]][name].shape) >= _MATRIX
        and not f"{name}.".startswith(beside)
    )
    if not parts:
        return None
    first = samples[0]
    site = first.by_rank[ranks[0]].site
    return SameWorkView(model, ranks, apart, equal, len(samples), first.step, site)


def _on(
    samples: Sequence[GradientSample], ranks: Ranks, name: str
) -> list[tuple[GradientSum, ...]]:
    """Return what all these ranks gave for a parameter, for each sample; [] if one did not."""
    found = []
    for sample in samples:
        named = [sample.named(rank).get(name) for rank in ranks]
        seen = tuple(e for e in named if e is not None and e.passes and e.applied and e.norm)
        if len(seen) < len(ranks) or any(each.members or each.has_left for each in seen):
            return []
        found.append(seen)
    return found


def _are_equal(seen: Sequence[GradientSum]) -> bool:
    return _spread([_given(each) for each in seen]) <= COARSE * min(each.norm for each in seen)


def _are_apart(seen: Sequence[GradientSum]) -> bool:
    """Say whether both what was given and what is applied differ: nobody has summed it."""
    given, applied = [_given(each) for each in seen], [np.array(each.applied) for each in seen]
    least = min(float(np.linalg.norm(each)) for each in applied)
    is_given_apart = _spread(given) > ALIKE * max(each.norm for each in seen)
    return is_given_apart and _spread(applied) > ALIKE * least


def _given(each: GradientSum) -> Array:
    return np.asarray(np.sum(each.passes, axis=0), dtype=np.float64)


def _spread(found: Sequence[Array]) -> float:
    return float(np.ptp(np.array(found), axis=0).max())
