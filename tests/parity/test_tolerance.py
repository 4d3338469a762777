"""Tests of the tolerance: derived from repeats of the reference, for each tensor."""

import math

import numpy as np
import pytest

from distdiag.parity.tolerance import (
    DROWNED,
    Common,
    Exactness,
    compare,
    difference_of,
    distances,
    in_common,
    measure,
)

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


def test_in_a_coarse_dtype_rounding_once_is_less_than_the_perturbation(reference):
    repeats = [reference, noisy(reference, 1e-2, 1)]
    candidate = noisy(reference, 5e-2, 2)
    fine = measure("w", reference, candidate, repeats, Exactness(UNIT))
    coarse = measure("w", reference, candidate, repeats, Exactness(UNIT, computed=2.0**-7))
    assert (
        difference_of(fine, Common(), sees_factor=False).ratio
        < 1
        < difference_of(coarse, Common(), sees_factor=False).ratio
    )


def test_what_is_not_deterministic_counts_as_it_is(reference):
    repeats = [noisy(reference, 1e-2, 1), reference]
    candidate = noisy(reference, 5e-2, 2)
    found = measure("w", reference, candidate, repeats, Exactness(UNIT, computed=2.0**-7))
    assert difference_of(found, Common(), sees_factor=False).ratio < 1


def test_few_elements_that_the_perturbation_left_alone_by_chance_borrow_the_noise_of_others():
    scalar, others = np.array([2.0]), np.ones((64, 64))
    measured = [measure("s", scalar, scalar * 1.001, [scalar, scalar], Exactness(UNIT))]
    for seed in range(3):
        repeats = [others, noisy(others, 1e-3, seed)]
        measured.append(measure("w", others, others, repeats, Exactness(UNIT)))
    assert difference_of(measured[0], Common()).ratio > 1
    assert difference_of(measured[0], in_common(measured)).ratio < 1


def test_a_factor_that_the_perturbation_had_by_chance_only_elsewhere_is_allowed(reference):
    leaning = [1.0003 * noisy(reference, 1e-4, seed) for seed in range(3)]
    measured = [
        measure(name, reference, candidate, [reference, perturbed], Exactness(UNIT))
        for name, candidate, perturbed in (
            ("a", 1.0003 * reference, noisy(reference, 3e-4, 7)),
            *(("b", reference, each) for each in leaning),
        )
    ]
    assert difference_of(measured[0], Common()).ratio > 1
    assert difference_of(measured[0], in_common(measured)).ratio < 1


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


def test_each_step_adds_rounding_of_its_own(reference):
    repeats = [noisy(reference, 1e-6, 1)]
    first, late = (
        measure("w", reference, reference, repeats, Exactness(UNIT, num_steps=number))
        for number in (0, 15)
    )
    assert late.noise == pytest.approx(4 * first.noise)
    assert late.spread == pytest.approx(4 * first.spread)
