import pytest

from distdiag.checks.dat.uneven_batches import UnevenBatches
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.alignment import EpochView
from tests.checks.feeds import epoch_fed
from tests.checks.streams import together
from tests.checks.verdicts import findings


def judged(*changes):
    events = [epoch_fed(rank, range(8), **change) for rank, change in enumerate(changes)]
    return findings(UnevenBatches, together(*events).show_as(EpochView, {}))


def test_the_rank_with_fewer_batches_is_noted():
    (finding,) = judged({"num_batches": 5}, {"num_batches": 4})
    assert (finding.ranks, finding.severity) == (RankSet([1]), Severity.INFO)
    assert "has 4 batches on rank 1 and up to 5 on other ranks" in finding.message


@pytest.mark.parametrize(
    "change", [{}, {"is_complete": False}, {"num_backwards": 0}, {"members": ()}], ids=str
)
def test_evaluations_and_passes_that_were_ended_are_silent(change):
    other = {"num_batches": 4} if change else {}
    assert not judged(other, change)
