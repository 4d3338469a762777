"""Tests of the tolerance: derived from repeats of the reference, for each tensor."""

import math

import numpy as np
import pytest

from distdiag.parity.tolerance import DROWNED, compare, distances

UNIT = 2.0**-23


@pytest.fixture
def reference():
    return np.random.default_rng(0).normal(size=(64, 32))


def noisy(array, size, seed):
    return array * (1 + size * np.random.default_rng(seed).normal(size=array.shape))


def test_another_order_of_the_same_sums_is_within_the_bound(reference):
    repeats = [noisy(reference, 1e-6, 1), reference]
    for seed in range(20):
        found = compare("w", reference, noisy(reference, 1e-6, 10 + seed), repeats, UNIT)
        assert found.ratio < 1


def test_a_factor_is_seen_though_each_element_is_within_its_noise(reference):
    repeats = [noisy(reference, 1e-3, 1)]
    candidate = 1.001 * noisy(reference, 1e-3, 2)
    found = compare("w", reference, candidate, repeats, UNIT)
    assert found.ratio > 1
    assert found.factor == pytest.approx(1.001, abs=2e-4)


def test_one_wrong_element_is_seen(reference):
    candidate = reference.copy()
    candidate[3, 4] += 1.0
    assert compare("w", reference, candidate, [noisy(reference, 1e-6, 1)], UNIT).ratio > 100


def test_what_rounding_drowns_is_not_compared(reference):
    repeats = [noisy(reference, 2 * DROWNED, 1)]
    assert compare("w", reference, 3 * reference, repeats, UNIT) is None


def test_nan_in_one_run_differs_and_in_both_says_nothing(reference):
    broken = reference.copy()
    broken[0, 0] = math.nan
    assert compare("w", reference, broken, [reference], UNIT).ratio == math.inf
    assert compare("w", broken, broken, [broken], UNIT) is None


def test_zero_is_compared_too():
    zero, one = np.zeros(4), np.ones(4)
    assert compare("w", zero, zero, [zero], UNIT).ratio == 0.0
    assert compare("w", zero, one, [zero], UNIT).ratio == math.inf


@pytest.mark.parametrize("shape", [(), (1,), (0,), (65_536,), (3, 65_537)])
def test_distances_in_blocks_are_those_of_the_whole(shape):
    generator = np.random.default_rng(3)
    reference = np.asarray(generator.normal(size=shape), np.float32)
    others = [np.asarray(reference * 1.5, np.float32), reference]
    size, found = distances(reference, others)
    exact = reference.astype(np.float64)
    assert size == pytest.approx(np.linalg.norm(exact))
    assert found[0].size == pytest.approx(np.linalg.norm(others[0] - exact))
    assert found[0].factor == pytest.approx(1.5 if size else 1.0)
    assert found[1] == (0.0, 1.0)
