"""Tests of explanations: factor, sign, order, offset, and the weights of the ranks' data."""

import numpy as np
import pytest

from distdiag.events.comparisons import Difference
from distdiag.parity.explanations import Pair, explain, weights_of
from distdiag.parity.tolerance import distances

SIZES = {"the number of ranks": 4, "the number of accumulation steps": 3}


def pair(reference, candidate, name="w"):
    factor = distances(reference, [candidate])[1][0].factor
    found = Difference(name=name, measured=1.0, bound=0.1, ratio=10.0, factor=factor)
    return Pair(found, reference, candidate)


@pytest.fixture
def gradients():
    random = np.random.default_rng(0)
    return [random.normal(size=(8, 5)), random.normal(size=(16,))]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "times the number of ranks (4)"),
        (0.25, "divided by the number of ranks (4)"),
        (2.0, "times the square root of the number of ranks (4)"),
        (3.0, "times the number of accumulation steps (3)"),
        (1 / 3, "divided by the number of accumulation steps (3)"),
        (-1.0, "the sign is turned round"),
        (1.37, "all 2 are 1.37 times as large"),
    ],
)
def test_a_common_factor_is_named(gradients, factor, words):
    assert words in explain([pair(g, factor * g) for g in gradients], SIZES).text


def test_factors_that_are_not_common_are_none(gradients):
    pairs = [pair(gradients[0], 4 * gradients[0]), pair(gradients[1], 2 * gradients[1])]
    assert "4" not in explain(pairs, SIZES).text


def test_swapped_shards_are_reported_by_their_order(gradients):
    reference = gradients[0]
    candidate = np.concatenate([reference[2:4], reference[0:2], reference[4:]])
    assert "another order: 1, 0, 2, 3" in explain([pair(reference, candidate)], SIZES).text


def test_a_constant_offset_is_reported(gradients):
    assert "0.5 larger" in explain([pair(gradients[1], gradients[1] + 0.5)], SIZES).text


def test_noise_has_no_explanation(gradients):
    other = np.random.default_rng(5).normal(size=gradients[0].shape)
    assert explain([pair(gradients[0], other)], SIZES).text == ""


def test_a_missing_rank_is_found_by_the_weights_of_its_data():
    random = np.random.default_rng(1)
    alone = [[random.normal(size=(6, 4))] for _ in range(3)]
    reference = sum(part[0] for part in alone) / 3
    candidate = (alone[0][0] + alone[1][0]) / 3
    weights = weights_of([pair(reference, candidate)], alone)
    assert weights.candidate == pytest.approx((1 / 3, 1 / 3, 0), abs=1e-9)
    assert "the data of coordinate 2 does not enter" in weights.phrase()


def test_unequal_token_counts_show_as_weights():
    random = np.random.default_rng(1)
    alone = [[random.normal(size=(6, 4))] for _ in range(2)]
    reference = 0.75 * alone[0][0] + 0.25 * alone[1][0]
    candidate = 0.5 * alone[0][0] + 0.5 * alone[1][0]
    weights = weights_of([pair(reference, candidate)], alone)
    assert "0.5, 0.5; in the reference with 0.75, 0.25" in weights.phrase()


def test_gradients_that_are_no_mixture_have_no_weights():
    random = np.random.default_rng(1)
    alone = [[random.normal(size=(6, 4))] for _ in range(2)]
    reference = 0.5 * (alone[0][0] + alone[1][0])
    assert weights_of([pair(reference, random.normal(size=(6, 4)))], alone) is None


def test_the_factor_of_tensors_too_large_to_keep_is_reported_by_what_was_measured():
    measured = {"bound": 1e-6, "ratio": 1e6}
    doubled = Difference(name="w", measured=1.0, factor=2.0, **measured)
    empty = np.empty(0)
    sizes = {"the number of ranks": 2}
    assert "times the number of ranks (2)" in explain([Pair(doubled, empty, empty)], sizes).text
    noise = Difference(name="w", measured=1.4, factor=2.0, **measured)
    assert explain([Pair(noise, empty, empty)], sizes).text == ""


def test_parts_that_nobody_adds_to_are_reported(gradients):
    lost = gradients[0].copy()
    lost[2:4] = 0
    found = explain([pair(gradients[0], lost)], {"the number of ranks": 4})
    assert "those with the numbers 1 are all zero" in found.text
    assert found.parts == (0.25,)
    wrong = gradients[0].copy()
    wrong[6:] += np.arange(10).reshape(2, 5)
    found = explain([pair(gradients[0], wrong)], {"the number of ranks": 4})
    assert "of its 4 parts along dimension 0, those with the numbers 3 alone differ" in found.text
