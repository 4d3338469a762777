from __future__ import annotations

from distdiag.checks.par.gradient_disparity import GradientDisparity
from distdiag.events.comparisons import Subject
from distdiag.findings.finding import Grade, Severity
from tests.checks.divergences import divergence, findings


def test_it_names_the_gradient_and_the_factor():
    shown = divergence(Subject.GRADIENT, explanation="times the number of ranks (2)")
    (found,) = findings(GradientDisparity, shown)
    assert found.subjects == ("layers.1.weight",)
    assert "times the number of ranks (2)" in found.message
    assert found.evidence[0].values["factor"] == 2.0


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(GradientDisparity, divergence(Subject.LOSS)) == []


def test_a_loss_of_whole_batches_is_a_note():
    shown = divergence(Subject.GRADIENT, explanation="of the batch", is_of_batches=True)
    (found,) = findings(GradientDisparity, shown)
    assert found.severity is Severity.INFO


def test_what_the_comparison_itself_has_filled_up_proves_nothing():
    (finding,) = findings(GradientDisparity, divergence(Subject.GRADIENT, padded=("1", "batch/y")))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "--pad 1=VALUE --pad y=VALUE" in finding.message
