from __future__ import annotations

from distdiag.checks.par.loss_disparity import LossDisparity
from distdiag.events.comparisons import Subject
from distdiag.findings.finding import Grade, Severity
from tests.checks.divergences import divergence, findings


def test_it_shows_the_weights_of_the_data():
    shown = divergence(Subject.LOSS, weights=(0.5, 0.5), due=(0.75, 0.25), explanation="weights")
    (found,) = findings(LossDisparity, shown)
    weights = found.evidence[1].values
    assert weights["weight of coordinate 0"] == 0.5
    assert weights["due weight of coordinate 0"] == 0.75


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(LossDisparity, divergence(Subject.GRADIENT)) == []


def test_a_loss_of_whole_batches_is_a_note():
    shown = divergence(Subject.LOSS, explanation="of the batch", is_of_batches=True)
    (found,) = findings(LossDisparity, shown)
    assert found.severity is Severity.INFO


def test_what_the_comparison_itself_has_filled_up_proves_nothing():
    (finding,) = findings(LossDisparity, divergence(Subject.LOSS, padded=("1", "batch/y")))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "--pad 1=VALUE --pad y=VALUE" in finding.message
