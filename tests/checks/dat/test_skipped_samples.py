import pytest

from distdiag.checks.dat.skipped_samples import SkippedSamples
from distdiag.engine.data import DataAligner
from distdiag.events.ranks import RankSet
from distdiag.views.data import ResumedPassView
from tests.checks.feeds import epoch_fed
from tests.checks.verdicts import findings
from tests.engine.aligned import aligned

ORDER = [7, 3, 12, 9, 0, 5, 14, 1, 11, 2, 8, 6]
ANEW = ORDER[::-1]
BROKEN = {"is_complete": False, "num_batches": 3}
RESUMED = {"stream": "Data 1 by DistributedSampler", "num_before_training": 4}


def judged(first=ORDER, second=ANEW, *, broken=BROKEN, resumed=RESUMED):
    """What is found where both ranks break one pass off, and make another one."""
    passes = [epoch_fed(rank, first, **broken) for rank in (0, 1)]
    passes += [epoch_fed(rank, second, **resumed) for rank in (0, 1)]
    views, _, _ = aligned(DataAligner, *passes, world=RankSet([0, 1]))
    shown = [view for view in views if isinstance(view, ResumedPassView)]
    return [finding for view in shown for finding in findings(SkippedSamples, view)]


def test_batches_that_are_skipped_in_another_order():
    (finding,) = judged()
    assert (finding.ranks, finding.location.line) == (RankSet([0, 1]), 10)
    assert "its first 3 batches are left out" in finding.message
    assert "7, 3, 12, 9, 0, 5, 14, 1" in finding.evidence[0].summary


@pytest.mark.parametrize(
    "values",
    [
        {"second": ORDER},
        {"broken": {**BROKEN, "is_complete": True}},
        {"broken": {**BROKEN, "is_trained": False}},
        {"broken": {**BROKEN, "num_batches": 4}},
        {"broken": {**BROKEN, "num_batches": 2}, "resumed": {**RESUMED, "num_before_training": 3}},
        {"broken": {**BROKEN, "dataset": "Other"}},
        {"resumed": {**RESUMED, "num_before_training": 1}},
        {"resumed": {**RESUMED, "is_trained": False}},
        {"resumed": {**RESUMED, "num_skipped": 3}},
    ],
    ids=str,
)
def test_another_pass_is_silent(values):
    assert not judged(**values)
