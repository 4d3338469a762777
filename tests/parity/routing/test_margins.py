"""Margins in roundings, and which of them rounding may turn round."""

import numpy as np
import pytest

from distdiag.parity.routing.comparison import Histogram, bound, margins, roundings
from distdiag.parity.routing.recordings import Choices


def test_a_margin_is_counted_in_units_of_the_greatest_score():
    found = roundings(np.array([0.0, 2.0**-23, 2.0**-22]), np.array([1.0, 1.0, 4.0]), "float32")
    assert found.tolist() == [0.0, 1.0, 0.5]
    assert roundings(np.array([2.0**-7]), np.array([1.0]), "bfloat16").tolist() == [1.0]


def test_where_all_experts_are_chosen_no_margin_is_small():
    inner, outer = np.array([0.5, -np.inf]), np.array([-np.inf, -np.inf])
    choices = Choices(np.zeros((2, 1), np.int32), inner, outer, np.array([0.5, 0.0]))
    assert margins(choices).tolist() == [np.inf, 0.0]
    assert roundings(np.array([np.inf]), np.array([0.0]), "float32").tolist() == [np.inf]


def test_the_coarsest_type_that_is_computed_in_decides_what_rounding_explains():
    assert bound(["float32", "bfloat16"]) == 4 * 2.0**-7
    assert bound([]) == bound(["float32"]) < 0.001


@pytest.mark.parametrize(("dtypes", "is_numeric"), [(["float32"], False), (["bfloat16"], True)])
def test_flips_of_scores_from_coarse_numbers_are_numeric_at_wider_margins(dtypes, is_numeric):
    histogram = Histogram(dtypes)
    histogram.add(2, np.array([3.0, 1e5]), "float32", np.array([False, True]))
    histogram.add(1, np.array([3.0, 3.0]), "float32", np.array([False, True]))
    bins = histogram.bins()
    (wide,) = (each for each in bins if each.up_to == 2.0**18)
    assert (wide.num_tokens, wide.num_flipped, wide.num_flipped_first) == (1, 1, 0)
    assert wide.is_numeric is is_numeric
    (close,) = (each for each in bins if each.up_to == 4.0)
    assert (close.num_tokens, close.num_flipped, close.num_flipped_first) == (3, 1, 1)
