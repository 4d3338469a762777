"""The noise of a series, its running level, and how rare a value is; all estimated from itself."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from distdiag.metrics.series import Floats

SIGMA_OF_MAD: Final = 1.4826
"""A normal distribution's standard deviation, in medians of its absolute deviation: 1 / 0.6745."""
HALF_WINDOW: Final = 12
"""The running level is a median of 25 values: what lasts up to 12 values does not move it."""
FEWEST_OF_TAIL: Final = 15
"""Fewer values tell the shape of a tail no better than within a third."""
USUAL_SHAPE: Final = 0.1
PRIOR_VALUES: Final = 20.0
"""A tail a little longer than exponential is assumed until the values say more: the standard error
of a shape from 20 values is 0.2, as large as the shapes that losses have."""
CHUNK: Final = 1 << 14
"""Running medians are taken of so many values at a time, to hold a few MiB and not the square."""


def mad_sigma(values: Floats) -> float:
    """Return a standard deviation by the median of absolute deviations; 0 for no value."""
    if not values.size:
        return 0.0
    return SIGMA_OF_MAD * float(np.median(np.abs(values - np.median(values))))


def quantum(values: Floats) -> float:
    """Return the smallest difference of two values: the last digit that is printed; 0 if none."""
    distinct = np.diff(np.unique(values))
    # Differences of a float64's rounding are none of the values'.
    distinct = distinct[distinct > 1e-12 * max(float(np.abs(values).max(initial=0.0)), 1e-300)]
    return float(distinct.min()) if distinct.size else 0.0


def noise_of(values: Floats) -> float:
    """Return the standard deviation of the noise, from second differences: a slope adds nothing.

    The second difference of independent noise has 6 times its variance. Rounding alone gives no
    smaller noise than that of a uniform distribution over the last digit.
    """
    floor = quantum(values) / math.sqrt(12.0)
    return max(mad_sigma(np.diff(values, n=2)) / math.sqrt(6.0), floor)


def running_median(values: Floats, half: int = HALF_WINDOW) -> Floats:
    """Return the median of the values around each, as many on one side as on the other.

    Towards the ends the window gets narrower, so that a slope never looks like a deviation.
    """
    size = len(values)
    half = min(half, (size - 1) // 2)
    level = values.astype(np.float64, copy=True)
    if half <= 0:
        return level
    for begin in range(half, size - half, CHUNK):
        end = min(begin + CHUNK, size - half)
        windows = sliding_window_view(values[begin - half : end + half], 2 * half + 1)
        level[begin:end] = np.median(windows, axis=1)
    for index in range(1, half):
        level[index] = np.median(values[: 2 * index + 1])
        level[size - 1 - index] = np.median(values[size - 1 - 2 * index :])
    return level


def local_sigma(deviations: Floats, whole: float, half: int = 2 * HALF_WINDOW) -> Floats:
    """Return the noise around each value: noise that changes over a run is taken where it is.

    It is never less than a third of `whole`, the noise of the whole series: an estimate from 49
    values is off by a factor of two now and then where values are rounded or hold still.
    """
    size = len(deviations)
    half = min(half, (size - 1) // 2)
    if half <= 0:
        return np.full(size, whole)
    sigma = np.empty(size)
    magnitudes = np.abs(deviations)
    for begin in range(half, size - half, CHUNK):
        end = min(begin + CHUNK, size - half)
        windows = sliding_window_view(magnitudes[begin - half : end + half], 2 * half + 1)
        sigma[begin:end] = SIGMA_OF_MAD * np.median(windows, axis=1)
    sigma[:half], sigma[size - half :] = sigma[half], sigma[size - half - 1]
    return np.maximum(sigma, whole / 3.0)


def expected_beyond(excesses: Floats, beyond: float, longest: float) -> float:
    """Return how many values a tail has beyond a size; `excesses` are its values, less the least.

    The tail is a generalised Pareto distribution, fitted by probability-weighted moments (Hosking
    and Wallis, Technometrics 29, 1987). Its shape is drawn towards `USUAL_SHAPE` as if
    `PRIOR_VALUES` more values had said so, for few values tell little of it, and is at most
    `longest` (0: an exponential tail).
    """
    number = len(excesses)
    ordered = np.sort(excesses)
    first = float(ordered.mean())
    weights = 1.0 - (np.arange(1, number + 1) - 0.35) / number
    second = float((weights * ordered).mean())
    if first <= 0 or first <= 2 * second:
        return 0.0 if first <= 0 < beyond else float(number)
    shape = 2.0 - first / (first - 2.0 * second)
    shape = (number * shape + PRIOR_VALUES * USUAL_SHAPE) / (number + PRIOR_VALUES)
    shape = max(min(shape, longest), 1e-3)
    scale = first * (1.0 - shape)  # what gives the mean that was seen
    return float(number * (1.0 + shape * max(beyond, 0.0) / scale) ** (-1.0 / shape))


def outliers(sizes: Floats, most: int, longest: float) -> tuple[int, float, Floats]:
    """Return how many of the largest values belong to no tail of the others, and how likely.

    For each number up to `most`, the tail is taken from the values below; the chance that it has
    so many values so large is that of a Poisson distribution. Returned is the number with the
    smallest chance, the logarithm of that chance, and the values of the tail below, from the
    largest.
    """
    ordered = np.sort(np.maximum(sizes, 0.0))[::-1]
    tail = max(FEWEST_OF_TAIL, len(ordered) // 20)
    best, number = 0.0, 0
    for count in range(1, min(most, len(ordered) - tail - 1) + 1):
        below = ordered[count : count + tail]
        least = float(ordered[count + tail])
        expected = expected_beyond(below - least, float(ordered[count - 1]) - least, longest)
        # Logarithms: the chance of a few far values is smaller than the smallest float64.
        chance = count * math.log(max(min(expected, 1.0), 1e-300)) - math.lgamma(count + 1)
        if chance < best:
            best, number = chance, count
    return number, best, ordered[number : number + tail + 1]
