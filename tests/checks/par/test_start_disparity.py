from __future__ import annotations

from distdiag.checks.par.start_disparity import StartDisparity
from distdiag.events.comparisons import Subject
from tests.checks.divergences import divergence, findings


def test_it_names_the_parameter_that_begins_unlike():
    (found,) = findings(StartDisparity, divergence(Subject.START, step=0))
    assert found.subjects == ("layers.1.weight",)
    assert "1 of 10 parameters" in found.message


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(StartDisparity, divergence(Subject.LOSS)) == []
