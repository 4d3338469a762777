from __future__ import annotations

import math

import msgspec

from distdiag.checks.par.update_disparity import UpdateDisparity
from distdiag.events.comparisons import Difference, Subject
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.divergences import divergence, findings


def test_it_names_the_parameter_and_the_rates():
    shown = divergence(Subject.UPDATE, details=("rank 1 has the learning rates (0.1,)",))
    (found,) = findings(UpdateDisparity, shown)
    assert found.subjects == ("layers.1.weight",)
    assert "rank 1 has the learning rates" in found.evidence[1].summary


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(UpdateDisparity, divergence(Subject.LOSS)) == []


def test_copies_that_part_are_told_without_a_size():
    difference = Difference(
        name="Net/a.weight", measured=math.nan, bound=0.0, ratio=math.inf, factor=math.nan
    )
    shown = divergence(Subject.UPDATE, culprits=[1])
    shown = msgspec.structs.replace(shown, differences=(difference,))
    (found,) = findings(UpdateDisparity, shown)
    assert "a.weight differs between the ranks that hold it" in found.message
    assert "nan" not in found.message
    assert found.ranks == RankSet([1])


def test_a_learning_rate_is_not_called_a_parameter():
    difference = Difference(
        name="learning rate of parameter group 0", measured=0.01, bound=1e-6, ratio=1e4, factor=1.01
    )
    shown = msgspec.structs.replace(divergence(Subject.UPDATE), differences=(difference,))
    (found,) = findings(UpdateDisparity, shown)
    assert "at step 3 of 2 ranks the learning rate of parameter group 0 differs" in found.message
    assert found.subjects == ("learning rate of parameter group 0",)


def test_what_the_comparison_itself_has_filled_up_proves_nothing():
    (finding,) = findings(UpdateDisparity, divergence(Subject.UPDATE, padded=("1", "batch/y")))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "--pad 1=VALUE --pad y=VALUE" in finding.message
