import pytest

from distdiag.checks.local_batch_statistics import LocalBatchStatistics
from distdiag.finding import Severity
from distdiag.ranks import RankSet
from tests.checks.feeds import feeds, model_fed


def judged(**values):
    fields = {"num_local_norms": 3, "batch_sizes": (2,), **values}
    passes = [[model_fed(rank, number, **fields) for rank in (0, 1)] for number in (0, 1)]
    return list(LocalBatchStatistics().check_feeds(feeds(*passes)))


def test_norms_over_two_samples_are_named():
    (finding,) = judged()
    assert finding.severity is Severity.WARNING
    assert finding.ranks == RankSet([0, 1])
    assert finding.location.line == 20
    assert "3 layers of DDP Net normalise by the statistics of 2 samples" in finding.message


def test_over_four_samples_it_is_a_note():
    (finding,) = judged(batch_sizes=(4,))
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "change",
    [{"batch_sizes": (8,)}, {"num_local_norms": 0}, {"batch_sizes": (2, 3)}, {"inputs": ("x",)}],
    ids=["enough samples", "shared or frozen", "not known which is the batch", "same samples"],
)
def test_right_models_are_silent(change):
    assert not judged(**change)
