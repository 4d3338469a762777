from __future__ import annotations

from distdiag.checks.par.output_disparity import OutputDisparity
from distdiag.events.comparisons import Subject
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.divergences import divergence, findings


def test_it_names_module_rank_and_step():
    (found,) = findings(OutputDisparity, divergence(Subject.OUTPUT, culprits=(1,)))
    assert found.ranks == RankSet([1])
    assert found.subjects == ("layers.1.weight",)
    assert "on rank 1" in found.message and "step 3" in found.message


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(OutputDisparity, divergence(Subject.LOSS)) == []


def test_what_the_comparison_itself_has_filled_up_proves_nothing():
    (finding,) = findings(OutputDisparity, divergence(Subject.OUTPUT, padded=("1", "batch/y")))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "--pad 1=VALUE --pad y=VALUE" in finding.message
