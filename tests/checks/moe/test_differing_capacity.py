from distdiag.checks.moe.differing_capacity import DifferingCapacity
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.exchanges import exchange, unfit
from tests.checks.verdicts import findings


def judged(*parts):
    return findings(DifferingCapacity, unfit(*parts))


def test_capacities_that_differ_are_named_for_each_rank():
    (finding,) = judged(
        exchange(0, (6, 6), (6, 6), even=True, capacity=3),
        exchange(1, (8, 8), (8, 8), even=True, capacity=4),
    )
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert finding.subjects == ("layers.0.moe",)
    assert "6 rows to each rank (3 for each expert) on rank 0" in finding.message
    assert "8 rows to each rank (4 for each expert) on rank 1" in finding.message


def test_equal_splits_are_judged_like_none_and_need_no_known_capacity():
    (finding,) = judged(exchange(0, (6, 6), (6, 6)), exchange(1, (8, 8), (8, 8)))
    assert "6 rows to each rank on rank 0" in finding.message


def test_ranks_that_choose_the_number_of_rows_for_each_peer_are_left_to_another_check():
    assert not judged(exchange(0, (5, 7), (6, 6)), exchange(1, (8, 8), (8, 8)))
