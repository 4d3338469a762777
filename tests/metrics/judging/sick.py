"""Curves with one planted fault each, drawn from a seed, with the step at which it begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distdiag.metrics.series import Curves
from tests.metrics.judging.healthy import KINDS, curves_of, decay, language_model, noise


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


def lost_loss(seed: int) -> Planted:
    """NaN from one step on, after the gradients grew."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size // 5, size))
    made["loss"][at:] = rng.choice([np.nan, np.inf])
    made["grad_norm"][at - 3 : at] *= 30
    return Planted(curves_of(made), at + 1)


def rate_jump(seed: int) -> Planted:
    """The rate goes up by a factor in the middle of its decay."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.4, size * 0.95))
    made["lr"][at:] = made["lr"].max() * rng.uniform(3, 100)
    return Planted(curves_of(made), at + 1)


def rate_zero(seed: int) -> Planted:
    """A scheduler that thinks that it is at its end."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.2, size * 0.5))
    made["lr"][at:] = 0.0
    return Planted(curves_of(made), at + 1)


def scale_collapse(seed: int) -> Planted:
    """Every step overflows from one step on."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.6, size - 20))
    scale = np.full(size, 2.0 ** rng.integers(9, 17))
    scale[at:] = np.maximum(scale[at:] / 2.0 ** (1 + np.arange(size - at)), 1.0)
    return Planted(curves_of({**made, "loss_scale": scale}), at + 1)


def stuck(seed: int) -> Planted:
    """The loss repeats one value."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.4, size * 0.6))
    loss = decay(rng, size) * (1 + 0.02 * noise(rng, size, KINDS[rng.integers(len(KINDS))]))
    made["loss"] = np.round(loss, 4)
    made["loss"][at:] = made["loss"][at]
    return Planted(curves_of(made), at + 1)


def zero_gradient(seed: int) -> Planted:
    """The backward pass is cut: norm 0, and a loss that is noise."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.4, size * 0.6))
    made["loss"][at:] = made["loss"][at] * (1 + 0.01 * rng.normal(size=size - at))
    made["grad_norm"][at:] = 0.0
    return Planted(curves_of(made), at + 1)


def overfitting(seed: int) -> Planted:
    """The validation loss has a minimum, and rises by a fifth at least."""
    rng, made, size = _base(seed)
    number = int(rng.integers(20, 60))
    lowest = int(rng.integers(number // 4, number // 2))
    x = np.arange(number)
    low = 2.0 + (lowest - x).clip(0) * 0.05
    low += (x - lowest).clip(0) * rng.uniform(0.03, 0.1)
    val = low * (1 + 0.002 * rng.normal(size=number))
    steps = (x + 1) * (size // number)
    made["loss"] = 2.5 * np.exp(-np.arange(size) / size) * (1 + 0.01 * rng.normal(size=size))
    return Planted(curves_of({**made, "val_loss": (steps, val)}), int(steps[lowest]))


def slower(seed: int) -> Planted:
    """Steps that take twice as long from one step on, or drift."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.3, size * 0.8))
    seconds = 0.5 * (1 + 0.02 * np.abs(noise(rng, size, "laplace")))
    after = np.arange(size - at) + 1.0
    seconds[at:] *= 1.8 if rng.integers(2) else np.minimum(1 + 0.06 * after, 2.5)
    if rng.integers(2):
        return Planted(curves_of({**made, "step_time_s": seconds}), at + 1)
    return Planted(curves_of({**made, "throughput": 1e5 / seconds}), at + 1)


def entropy_collapse(seed: int) -> Planted:
    """All outputs become one."""
    rng, _, size = _base(seed)
    at = int(rng.integers(size * 0.3, size * 0.8))
    entropy = (0.5 + np.exp(-np.arange(size) / size)) * np.exp(0.05 * rng.normal(size=size))
    entropy[at:] = 1e-4
    reward = 0.5 + 0.1 * rng.normal(size=size) - 0.5 * (np.arange(size) >= at)
    return Planted(curves_of({"entropy": entropy, "reward": reward}), at + 1)


def reward_collapse(seed: int) -> Planted:
    """A policy that forgets."""
    rng, _, size = _base(seed)
    at = int(rng.integers(size * 0.4, size * 0.8))
    reward = 1 - np.exp(-np.arange(size) / (0.2 * size)) + 0.05 * rng.normal(size=size)
    reward[at:] -= rng.uniform(0.7, 1.2)
    return Planted(curves_of({"reward": reward}), at + 1)


class PlantedRun(NamedTuple):
    """A run of several sources with a fault, its step, and the rank at fault if one is."""

    curves: list[Curves]
    step: int
    rank: int | None = None


def rank_parts(seed: int) -> PlantedRun:
    """One of several ranks goes its own way; all see data of their own, or the same loss."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.3, size * 0.8))
    rank, ranks = int(rng.integers(4)), []
    is_reduced = bool(rng.integers(2))
    for index in range(4):
        loss = made["loss"] * (1 if is_reduced else 1 + 0.02 * rng.normal(size=size))
        if index == rank:
            after = np.arange(size - at)
            loss[at:] *= 1 + (0.01 * (after + 1) if is_reduced else np.minimum(0.2 + after, 0.5))
        ranks.append(curves_of({"loss": loss}, rank=index, name=f"rank{index}.log"))
    return PlantedRun(ranks, at + 1, rank)


def straggler(seed: int) -> PlantedRun:
    """One rank takes half as long again."""
    rng, _, size = _base(seed)
    rank, ranks = int(rng.integers(4)), []
    for index in range(4):
        seconds = 0.5 * (1 + 0.03 * np.abs(noise(rng, size, "student")))
        seconds *= 1.5 if index == rank else 1
        ranks.append(curves_of({"step_time_s": seconds}, rank=index, name=f"rank{index}.log"))
    return PlantedRun(ranks, 1, rank)


def restart(seed: int, *, loss: bool = True, rate: bool = True) -> PlantedRun:
    """A restart from a checkpoint; without the weights, or with the schedule from its start."""
    rng, made, size = _base(seed)
    at = int(rng.integers(size * 0.5, size * 0.7))
    back = int(rng.integers(0, size // 10))
    steps = np.arange(size) + 1
    made["loss"] = (1 + 4 * np.exp(-steps / (0.1 * size))) * (1 + 0.01 * rng.normal(size=size))
    made["lr"] = 1e-3 * np.minimum(steps / (size * 0.05), 1) * (1 - 0.9 * steps / size)
    first = {key: (steps[:at], values[:at]) for key, values in made.items()}
    begin = at - back
    second = {key: (steps[begin:], values[begin:].copy()) for key, values in made.items()}
    if not loss:
        second["loss"] = (steps[begin:], made["loss"][: size - begin])
    if not rate:
        second["lr"] = (steps[begin:], made["lr"][: size - begin])
    curves = [curves_of(first), curves_of(second, attempt=1)]
    return PlantedRun(curves, begin + 1)


def lost_weights(seed: int) -> PlantedRun:
    """The loss after a restart is that of a model which nobody has trained."""
    return restart(seed, loss=False)


def new_schedule(seed: int) -> PlantedRun:
    """The learning rate after a restart warms up again."""
    return restart(seed, rate=False)
