import pytest

from distdiag.checks.par.schedule_outruns_steps import ScheduleOutrunsSteps
from distdiag.findings.finding import Severity
from tests.checks.feeds import schedule
from tests.checks.streams import together
from tests.checks.verdicts import findings

FAST = {
    "num_advances": 160,
    "least_pace": 4,
    "greatest_pace": 4,
    "num_planned": 40,
    "last_rate": 0.05,
}


def judged(**values):
    return findings(ScheduleOutrunsSteps, together(*[schedule(r, **values) for r in (0, 1)]))


def test_a_schedule_that_is_advanced_for_each_micro_batch_is_named():
    (finding,) = judged(**FAST)
    assert (finding.severity, finding.step) == (Severity.WARNING, 10)
    assert "LambdaLR is advanced 4 times for each optimizer step" in finding.message
    assert "the 40 steps of its plan were over by step 10, and 30 followed" in finding.message


def test_a_value_that_is_given_several_times_is_named():
    (finding,) = judged(**{**FAST, "follows_metric": True, "num_planned": 0})
    assert "LambdaLR is given each value 4 times: it counts each as 4 epochs" in finding.message


@pytest.mark.parametrize(
    "change",
    [
        {"num_planned": 160},
        {"num_planned": 30},
        {"num_planned": 0},
        {"greatest_pace": 5},
        {"least_pace": 2, "greatest_pace": 2},
        {"num_planned": 159},
    ],
    ids=[
        "made for micro-batches",
        "its period is shorter than the training",
        "without a plan",
        "not for each step",
        "once for each rank",
        "over with the training",
    ],
)
def test_right_schedules_are_silent(change):
    assert not judged(**{**FAST, **change})
