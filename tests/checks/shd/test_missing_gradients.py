import pytest

from distdiag.checks.shd.missing_gradients import MissingGradients
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

EMPTY = {"num_without_gradient": 4, "num_gradients": 0}


def test_an_optimizer_without_any_gradient_is_found_on_all_ranks():
    (finding,) = findings(MissingGradients, optimizers(EMPTY, EMPTY))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.PROVEN)
    assert (finding.severity, finding.subjects) == (Severity.ERROR, ("AdamW",))
    assert finding.location.line == 40
    assert "AdamW steps on ranks 0-1 though none of its 4 parameters" in finding.message


def test_the_one_rank_without_is_named_and_the_others_are_evidence():
    (finding,) = findings(MissingGradients, optimizers({}, EMPTY, {"num_without_gradient": 1}))
    assert finding.ranks == RankSet([1])
    assert [each.ranks for each in finding.evidence[1:]] == [RankSet([0]), RankSet([2])]
    assert finding.evidence[2].summary == "3 of 4 parameters have a gradient"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_without_gradient": 3},
        {**EMPTY, "num_gradients": 2},
        {**EMPTY, "num_foreign": 1},
        {**EMPTY, "num_backwards": 0},
        {**EMPTY, "num_parameters": 0, "num_without_gradient": 0},
    ],
    ids=[
        "all-have-one",
        "one-has-one",
        "another-model-has",
        "no-model-parameters",
        "no-backward",
        "no-parameters",
    ],
)
def test_steps_that_may_be_idle_are_silent(change):
    assert not findings(MissingGradients, optimizers(change, change))


def test_a_step_that_was_left_out_once_is_a_note():
    skipped = {**EMPTY, "was_fed": True, "num_idle": 1}
    (finding,) = findings(MissingGradients, optimizers(skipped, skipped))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_gradients_that_never_come_back_are_an_error():
    idle = {**EMPTY, "was_fed": True, "num_idle": 3}
    (finding,) = findings(MissingGradients, optimizers(idle, idle))
    assert finding.severity is Severity.ERROR
