"""Tests of parameters that are split by hand: the same values, others alike, and another scale."""

import numpy as np
import pytest

from distdiag.parity.parts import compare_parts
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind
from tests.parity.recordings import Rank

WHOLE = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


@pytest.fixture
def compare(tmp_path):
    def run(label, arrays):
        for rank, array in enumerate(arrays):
            writer = Rank(tmp_path / label, rank)
            writer.tensor(Kind.START, 0, "Net/weight", array)
            writer.close(1, len(arrays))
        return RecordedRun(tmp_path / label, label)

    return lambda *parts: compare_parts(run("one", [WHOLE]), run("several", parts), "Net/weight")


def test_parts_of_the_whole_are_the_same_wherever_they_belong(compare):
    assert compare(*np.split(WHOLE, 2, axis=1)) == (True, None)


def test_copies_of_a_part_count_once(compare):
    left, right = np.split(WHOLE, 2, axis=1)
    assert compare(left, left, right, right) == (True, None)


def test_values_drawn_anew_are_others_of_the_same_scale(compare):
    drawn = np.random.default_rng(1).normal(size=(2, 64, 16))
    assert compare(*drawn) == (False, None)


def test_the_scale_of_a_part_taken_for_the_whole_is_a_difference(compare):
    drawn = 2**0.5 * np.random.default_rng(1).normal(size=(2, 64, 16))
    found = compare(*drawn).difference
    assert found.factor == pytest.approx(2**0.5, rel=0.05)
    assert found.ratio > 1


def test_nothing_is_said_of_parts_that_are_not_all_of_the_whole(compare):
    assert compare(WHOLE[:, :20], WHOLE[:, :20]) is None
