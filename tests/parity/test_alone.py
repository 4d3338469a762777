"""Tests of what the data of each coordinate gives by itself."""

import numpy as np

from distdiag.events.comparisons import Difference
from distdiag.parity.explanations import Pair, is_mean_of

FIRST, SECOND = np.random.default_rng(0).normal(size=(2, 8, 4))
MEAN = (FIRST + SECOND) / 2
NONE = Difference(name="Net/weight", measured=0.0, bound=0.0, ratio=0.0)


def is_mean(reference, candidate):
    return is_mean_of([Pair(NONE, reference, candidate)], [[FIRST], [SECOND]])


def test_ranks_that_are_right_by_themselves_have_the_mean_of_what_each_gives_alone():
    assert is_mean(MEAN + 0.01, MEAN + 1e-6)


def test_a_small_part_that_is_wrong_on_the_ranks_is_reported_from_that():
    assert not is_mean(MEAN, MEAN + 0.01)


def test_runs_that_are_the_same_say_nothing():
    assert not is_mean(MEAN, MEAN)
