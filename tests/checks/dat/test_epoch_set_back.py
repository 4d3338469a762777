import pytest

from distdiag.checks.dat.epoch_set_back import EpochSetBack
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import epoch_fed
from tests.checks.streams import together
from tests.checks.verdicts import findings

ORDER = (9, 3, 1, 30)


def judged(**values):
    events = [epoch_fed(rank, ORDER, **values) for rank in (0, 1)]
    return findings(EpochSetBack, together(*events))


def test_a_resumed_pass_of_an_earlier_epoch_is_named():
    (finding,) = judged(epoch=0, epoch_before=3, num_skipped=5)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert "went back from 3 to 0, and the pass leaves out its first 5 batches" in finding.message
    assert finding.location.line == 10


def test_batches_that_are_fetched_and_not_trained_on_count_as_left_out():
    (finding,) = judged(epoch=0, epoch_before=1, num_before_training=5)
    assert "leaves out its first 4 batches" in finding.message


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 3},
        {"epoch": 4},
        {"epoch": None},
        {"epoch_before": None},
        {"num_backwards": 0},
        {"num_skipped": 0},
        {"num_skipped": 0, "num_before_training": 2},
    ],
    ids=str,
)
def test_a_right_resume_another_phase_and_an_evaluation_are_silent(change):
    assert not judged(**{"epoch": 0, "epoch_before": 3, "num_skipped": 5, **change})
