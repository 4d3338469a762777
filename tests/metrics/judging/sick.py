"""Curves with one planted fault each, drawn from a seed, with the step at which it begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distdiag.metrics.series import Curves
from tests.metrics.judging.healthy import curves_of, language_model


class Planted(NamedTuple):
    """A run with a fault, and the step of its first wrong value."""

    curves: Curves
    step: int


def _base(seed: int) -> tuple[np.random.Generator, dict[str, np.ndarray], int]:
    rng = np.random.default_rng(seed)
    size = int(rng.choice([100, 300, 1000, 2000]))
    return rng, language_model(rng, size), size


def loss_spike(seed: int) -> Planted:
    """One batch from nowhere: up at once, back within some steps."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size // 5, size - 15))
    width = int(rng.integers(1, 6))
    made["loss"][at : at + width] *= 1 + rng.uniform(1.5, 5) * 0.6 ** np.arange(width)
    return Planted(curves_of(made), at + 1)


def norm_spike(seed: int) -> Planted:
    """One gradient that is far larger than the others."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size // 5, size - 15))
    made["grad_norm"][at] *= 10 ** rng.uniform(1.7, 4)
    return Planted(curves_of(made), at + 1)


def divergence(seed: int) -> Planted:
    """The loss leaves its trend for good: in one jump, along a line, or faster and faster."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size // 3, size - size // 8))
    after = np.arange(size - at) + 1.0
    loss = made["loss"]
    level = float(np.median(loss[at - 10 : at]))
    spread = 1.5 * float(np.abs(np.diff(loss[at - 20 : at])).mean()) + 0.01 * level
    form = rng.integers(3)
    if form == 0:
        loss[at:] += level * rng.uniform(0.8, 3)
    elif form == 1:
        slope = max(3 * spread, level / len(after))
        loss[at:] += np.minimum(slope * after, 5 * level + 20 * spread)
    else:
        growth = 3 * spread * 1.3 ** np.minimum(after, 40)
        loss[at:] += np.minimum(growth, 4 * level + 20 * spread)
    return Planted(curves_of(made), at + 1)


def explosion(seed: int) -> Planted:
    """Gradients grow by a factor at each step."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size // 2, size - 20))
    after = np.minimum(np.arange(size - at) + 1, 18)
    made["grad_norm"][at:] *= rng.uniform(2.5, 4) ** after
    return Planted(curves_of(made), at + 1)
