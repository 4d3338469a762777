import pytest

from distdiag.checks.dat.missing_set_epoch import MissingSetEpoch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.feeds import epoch_fed
from tests.checks.streams import together
from tests.checks.verdicts import findings

ORDER = (9, 3, 1, 30, 17, 4, 22, 8)


def repeated(rank, order=ORDER, **values):
    values.setdefault("last_epoch", 0)
    return epoch_fed(rank, order, last_digest=str(hash(tuple(order))), **values)


def judged(*events):
    return findings(MissingSetEpoch, together(*events))


def test_an_order_that_comes_again_is_named_once_for_all_ranks():
    (finding,) = judged(repeated(0), repeated(1))
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.WARNING)
    assert (finding.grade, finding.location.line) == (Grade.PROVEN, 10)
    assert "passes 1 and 2 over Data have the same order" in finding.message
    assert "DistributedSampler (seed 0, epoch 0, part 0 of 2)" in finding.message


def test_a_rank_that_is_reported_the_epoch_is_no_culprit():
    (finding,) = judged(repeated(0), epoch_fed(1, ORDER, epoch=1, last_epoch=0))
    assert finding.ranks == RankSet([0])


@pytest.mark.parametrize(
    "change",
    [
        {"last_digest": "another order"},
        {"shuffle": False},
        {"uses_epoch": False},
        {"is_ascending": True},
        {"num_backwards": 0},
        {"is_complete": False},
        {"epoch": 1},
        {"epoch": None, "last_epoch": None},
        {"num_replicas": None},
        {"last_epoch": None},
    ],
    ids=str,
)
def test_what_may_be_meant_is_silent(change):
    values = {"last_digest": str(hash(ORDER)), "last_epoch": 0, **change}
    assert not judged(*[epoch_fed(rank, ORDER, **values) for rank in (0, 1)])


def test_a_few_samples_may_come_in_the_same_order_by_chance():
    assert not judged(repeated(0, (2, 1, 3)), repeated(1, (6, 5, 4)))
