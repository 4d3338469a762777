"""Curves and logs of runs that never were: falling losses, and what goes wrong with them."""

from __future__ import annotations

import numpy as np


def falling(num: int = 400, *, seed: int = 0, start: float = 4.0, end: float = 1.5) -> list[float]:
    """A loss that falls as a power law, with noise of 2 %."""
    rng = np.random.default_rng(seed)
    steps = np.arange(num)
    curve = end + (start - end) * (1 + steps / 20) ** -0.7
    return (curve * (1 + 0.02 * rng.standard_normal(num))).round(4).tolist()


def norms(num: int = 400, *, seed: int = 1, level: float = 1.0) -> list[float]:
    """Gradient norms around a level."""
    rng = np.random.default_rng(seed)
    return (level * np.exp(0.15 * rng.standard_normal(num))).round(4).tolist()


def diverging(num: int = 400, at: int = 250, *, seed: int = 0) -> dict[str, list[float]]:
    """A loss that leaves its course behind a spike of the gradient at one step."""
    rng = np.random.default_rng(seed + 5)
    loss, grad = falling(num, seed=seed), norms(num, seed=seed + 1)
    grad[at] = 87.5
    for step in range(at + 1, num):
        loss[step] = round(7.5 + 0.05 * float(rng.standard_normal()), 4)
        grad[step] = round(4.0 + 0.3 * float(rng.standard_normal()), 4)
    return {"step": list(range(num)), "loss": loss, "grad_norm": grad}


def exploding(num: int = 120, at: int = 60, *, seed: int = 0) -> dict[str, list[object]]:
    """Gradient norms that double from step to step until the loss is NaN."""
    loss: list[object] = list(falling(num, seed=seed))
    grad: list[object] = list(norms(num, seed=seed + 1))
    for step in range(at, num):
        grad[step] = round(1.4 * 2.0 ** (step - at), 3)
        if step > at + 3:
            loss[step] = round(1.7 * 1.3 ** (step - at - 3), 4)
        if step > at + 30:
            loss[step] = grad[step] = "nan"
    return {"step": list(range(num)), "loss": loss, "grad_norm": grad}


def nan_from(num: int = 200, at: int = 120, *, seed: int = 0) -> dict[str, list[object]]:
    """A loss that is NaN from a step on, out of the blue."""
    loss: list[object] = list(falling(num, seed=seed))
    loss[at:] = ["nan"] * (num - at)
    return {"step": list(range(num)), "loss": loss}


def stuck(num: int = 200, level: float = 2.302585) -> list[float]:
    """A loss that is the same to the last digit."""
    return [level] * num


def plateau(num: int = 400, level: float = 2.3026, *, seed: int = 0) -> list[float]:
    """A loss that stays at the level of guessing."""
    rng = np.random.default_rng(seed)
    return (level + 0.004 * rng.standard_normal(num)).round(5).tolist()


def log(curves: dict[str, list[object]], every: int = 1) -> str:
    """Write curves as a program prints them."""
    steps = curves["step"]
    names = [name for name in curves if name != "step"]
    lines = ["loading data", f"world size 8, {len(steps)} steps"]
    for place in range(0, len(steps), every):
        values = ", ".join(f"{name}: {curves[name][place]}" for name in names)
        lines.append(f"step: {steps[place]}, {values}")
    return "\n".join(lines) + "\n"
