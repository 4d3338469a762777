from __future__ import annotations

from distdiag.checks.update_disparity import UpdateDisparity
from distdiag.disparity import Subject
from tests.checks.disparities import disparity, findings


def test_it_names_the_parameter_and_the_rates():
    shown = disparity(Subject.UPDATE, details=("rank 1 has the learning rates (0.1,)",))
    (found,) = findings(UpdateDisparity, shown)
    assert found.subjects == ("layers.1.weight",)
    assert "rank 1 has the learning rates" in found.evidence[1].summary


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(UpdateDisparity, disparity(Subject.LOSS)) == []
