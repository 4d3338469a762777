import pytest

from distdiag.checks.par.overfast_schedule import OverfastSchedule
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import schedule
from tests.checks.streams import together
from tests.checks.verdicts import findings

FAST = {"num_advances": 80, "least_pace": 2, "greatest_pace": 2, "settled_at": 20}


def judged(**values):
    return findings(OverfastSchedule, together(*[schedule(r, **values) for r in (0, 1)]))


def test_a_schedule_that_ended_too_early_is_named():
    (finding,) = judged(**FAST)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.step == 20
    assert "LambdaLR is advanced 2 times for each optimizer step" in finding.message
    assert "fell to 0 by step 20, and 20 more steps" in finding.message


def test_a_rate_that_rises_again_after_the_planned_steps_is_named():
    (finding,) = judged(**{**FAST, "last_rate": 0.1, "num_planned": 40, "settled_at": 40})
    assert finding.step == 20
    assert "the 40 steps of its plan were over by step 20, and 20 followed" in finding.message


@pytest.mark.parametrize(
    "change",
    [
        {"least_pace": 1, "greatest_pace": 1},
        {"greatest_pace": 3},
        {"least_pace": 4, "greatest_pace": 4},
        {"settled_at": 39},
        {"last_rate": 0.01},
        {"last_rate": 0.01, "num_planned": 80},
        {"last_rate": 0.01, "num_planned": 10},
        {"follows_metric": True, "least_pace": 1, "greatest_pace": 1},
        {"follows_metric": True, "num_advances": 2},
    ],
    ids=[
        "once for each step",
        "an epoch's end beside it",
        "as often as gradients are accumulated",
        "ends with the training",
        "constant after a warm-up",
        "planned for all ranks",
        "a cosine that goes up and down",
        "each value once",
        "one value twice",
    ],
)
def test_right_schedules_are_silent(change):
    assert not judged(**{**FAST, **change})


def test_one_rank_alone_is_silent():
    assert not findings(OverfastSchedule, together(schedule(0, **FAST)))


def test_a_value_that_is_given_once_for_each_rank_is_named():
    (finding,) = judged(**{**FAST, "follows_metric": True, "last_rate": 0.05})
    assert "LambdaLR is given each value 2 times, once for each rank" in finding.message
    assert "fell from 0.1 to 0.05" in finding.message
