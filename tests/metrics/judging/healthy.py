"""Curves of runs that train well, of many families, drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from distdiag.metrics.series import Curves, Series

PLAYED = (
    *("loss", "val_loss", "grad_norm", "lr", "throughput", "step_time_s"),
    *("loss_scale", "kl", "reward", "entropy", "memory"),
)


def curves_of(
    values: Mapping[str, np.ndarray | tuple[np.ndarray, np.ndarray]],
    *,
    name: str = "train.log",
    rank: int | None = None,
    attempt: int = 0,
    roles: Mapping[str, str] | None = None,
    digits: int | None = None,
) -> Curves:
    """Return curves in memory: values by name, or steps and values."""
    series = {}
    for key, given in values.items():
        if isinstance(given, tuple):
            steps, numbers = given
        else:
            numbers, steps = given, np.arange(len(given)) + 1
        numbers = np.asarray(numbers, dtype=float)
        if digits is not None:
            numbers = np.array([float(f"{number:.{digits}g}") for number in numbers])
        lines = np.arange(len(numbers)) + 1
        series[key] = Series(key, np.asarray(steps, dtype=float), numbers, lines)
    played = roles or {key: key for key in series if key in PLAYED}
    return Curves(Path(name), "memory", series, dict(played), rank, attempt)


def noise(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Return noise of unit size, of one of several tails."""
    if kind == "normal":
        return rng.normal(size=size)
    if kind == "student":
        return rng.standard_t(3, size=size) / 1.7
    if kind == "laplace":
        return rng.laplace(size=size) / 1.4
    if kind == "autocorrelated":
        drawn = rng.normal(size=size)
        for index in range(1, size):
            drawn[index] = 0.7 * drawn[index - 1] + 0.7 * drawn[index]
        return drawn
    return (rng.lognormal(sigma=0.8, size=size) - 1.38) / 1.3  # skewed


KINDS = ("normal", "student", "laplace", "autocorrelated", "skewed")


def decay(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a loss without noise: a power law, an exponential, or a nearly flat fine-tuning."""
    x = np.arange(size) + 1.0
    start, end = rng.uniform(2, 11), rng.uniform(0.05, 2)
    form = rng.integers(4)
    if form == 0:
        return end + (start - end) * x ** -rng.uniform(0.15, 0.6)
    if form == 1:
        return end + (start - end) * np.exp(-x / (size * rng.uniform(0.02, 0.4)))
    if form == 2:
        return end * (1 + 0.2 * np.exp(-x / size))
    warm = rng.uniform(0.01, 0.1) * size
    return end + (start - end) * (x / warm + 1) ** -rng.uniform(0.3, 0.8)


def language_model(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Power-law loss, warm-up and cosine, gradient norm with a heavy tail."""
    kind = KINDS[rng.integers(len(KINDS))]
    trend = decay(rng, size)
    loss = trend * (1 + rng.choice([0.002, 0.01, 0.05]) * noise(rng, size, kind))
    x = np.arange(size)
    warm = int(size * rng.uniform(0.0, 0.1)) + 1
    peak = 10 ** rng.uniform(-5, -2.5)
    floor = rng.choice([0.0, 0.1])
    half = 0.5 * (1 + np.cos(np.pi * np.clip((x - warm) / (size - warm), 0, 1)))
    lr = np.where(x < warm, peak * (x + 1) / warm, peak * (floor + (1 - floor) * half))
    norm = (0.3 + 5 * np.exp(-x / (0.03 * size))) * np.exp(0.25 * noise(rng, size, "normal"))
    norm *= np.where(rng.uniform(size=size) < 0.003, rng.uniform(1, 4, size=size), 1)
    return {"loss": loss, "lr": lr, "grad_norm": norm}


def step_decay(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Classes of images: the rate falls by ten twice, and the loss falls with it."""
    x = np.arange(size)
    stage = (x > 0.5 * size).astype(int) + (x > 0.75 * size)
    start = rng.uniform(2, 7)
    loss = start * (0.25 + 0.75 * np.exp(-x / (0.1 * size))) * 0.6**stage
    loss *= 1 + 0.05 * noise(rng, size, KINDS[rng.integers(len(KINDS))])
    warm = rng.choice([1, 5, 50])
    lr = 0.1 * 0.1**stage * np.minimum((x + 1) / warm, 1)
    return {"loss": loss, "lr": lr}


def cyclic(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """A cyclic rate, or warm restarts: the loss rises and falls with the rate."""
    x = np.arange(size)
    number = rng.integers(2, 8)
    phase = (x * number / size) % 1
    wave = 1 - np.abs(2 * phase - 1) if rng.integers(2) else 0.5 * (1 + np.cos(np.pi * phase))
    lr = 1e-5 + 1e-3 * wave
    trend = 1 + 3 * np.exp(-x / (0.15 * size))
    loss = trend * (1 + rng.uniform(0.03, 0.2) * wave)
    loss *= 1 + 0.02 * noise(rng, size, KINDS[rng.integers(len(KINDS))])
    return {"loss": loss, "lr": lr} if rng.integers(2) else {"loss": loss}


def sawtooth(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Epochs: the loss falls at each reshuffle and rises a little within the epoch."""
    x = np.arange(size)
    number = int(rng.integers(2, 10))
    epoch = x * number // size
    within = (x * number / size) % 1
    loss = 2.5 * 0.8**epoch * (1 + 0.05 * within) + 2 * np.exp(-x / (0.02 * size))
    loss *= 1 + 0.03 * noise(rng, size, KINDS[rng.integers(len(KINDS))])
    steps = np.arange(size)[:: max(size // (number * 3), 1)] + 1
    val = 2.4 * 0.9 ** (steps * number / size) + 0.5
    val *= 1 + 0.01 * rng.normal(size=len(steps))
    return {"loss": loss, "val_loss": (steps, val)}


def adversarial(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Two networks against one another: one loss rises, both oscillate."""
    x = np.arange(size)
    wave = np.sin(x / size * rng.uniform(5, 60) + rng.uniform(0, 6))
    noisy = noise(rng, size, KINDS[rng.integers(len(KINDS))])
    g = 0.7 + rng.uniform(0.5, 4) * (1 - np.exp(-x / (0.2 * size))) + 0.4 * wave + 0.3 * noisy
    d = 0.3 + 0.4 * np.exp(-x / (0.1 * size)) - 0.1 * wave + 0.1 * noise(rng, size, "normal")
    return {"loss_G": np.abs(g), "loss_D": np.abs(d)}


def reinforcement(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """The reward rises with much noise, entropy falls, the loss means little."""
    x = np.arange(size)
    reward = rng.uniform(-1, 0.2) + (1 - np.exp(-x / (0.3 * size)))
    reward += 0.15 * noise(rng, size, KINDS[rng.integers(len(KINDS))])
    entropy = (0.3 + 1.2 * np.exp(-x / (0.3 * size))) * np.exp(0.1 * rng.normal(size=size))
    kl = 0.001 + 0.08 * (1 - np.exp(-x / (0.4 * size))) * np.exp(0.3 * rng.normal(size=size))
    loss = 0.02 * noise(rng, size, "student") + kl * 0.1
    return {"loss": loss, "reward": reward, "entropy": entropy, "kl": kl}


def mixed_precision(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """fp16: the loss scale is found at the start, and doubles and halves later."""
    made = language_model(rng, size)
    scale, scales, good = 2.0**16, [], 0
    window = int(rng.choice([100, 500, 2000]))
    norm = made["grad_norm"].copy()
    for index in range(size):
        overflow = (scale > 2**11 and index < 12) or (scale > 2**9 and rng.uniform() < 0.002)
        scale, good = (scale / 2, 0) if overflow else (scale, good + 1)
        if good == window:
            scale, good = scale * 2, 0
        if overflow:
            norm[index] = np.inf
        scales.append(scale)
    return {**made, "grad_norm": norm, "loss_scale": np.array(scales)}


def timed(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Step times with warm-up, checkpoints every k steps, and a long tail."""
    made = language_model(rng, size)
    seconds = rng.uniform(0.1, 5) * (1 + 0.02 * np.abs(noise(rng, size, "student")))
    seconds[: rng.integers(1, 4)] *= rng.uniform(2, 30)
    every = int(rng.integers(20, 200))
    seconds[every::every] *= rng.uniform(1, 4)
    memory = np.minimum(20 + np.arange(size), 40.0) + 0.1 * rng.uniform(size=size)
    return {**made, "step_time_s": seconds, "throughput": 4096 / seconds, "memory": memory}


def mini_batches(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Losses of single small batches: the last one of each epoch is short, gradients accumulate."""
    trend = decay(rng, size)
    shape = rng.uniform(2, 8)
    loss = trend * rng.gamma(shape, 1 / shape, size=size)
    every = int(rng.integers(30, 120))
    loss[every::every] *= rng.gamma(2, 0.5, size=len(loss[every::every]))
    group = int(rng.choice([1, 4, 8]))
    usable = len(loss) // group * group
    loss = loss[:usable].reshape(-1, group).mean(axis=1)
    return {"loss": loss}


FAMILIES = (
    *(language_model, step_decay, cyclic, sawtooth, adversarial, reinforcement),
    *(mixed_precision, timed, mini_batches),
)


def healthy(seed: int) -> Curves:
    """Return the healthy curves of a seed: its family, its length and its digits are drawn, too."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    size = int(rng.choice([60, 150, 400, 1000, 3000]))
    made = family(rng, size)
    roles = {key: key for key in made if key in PLAYED}
    if family is adversarial:
        roles = {"loss": "loss_G"}
    digits = [None, 3, 4, 6][rng.integers(4)]
    return curves_of(made, name=f"{family.__name__}-{seed}.log", roles=roles, digits=digits)
