import pytest

from distdiag.checks.moe.exchange_mismatch import ExchangeMismatch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.exchanges import exchange, trip, unfit
from tests.checks.verdicts import findings


def test_the_sender_and_the_receiver_of_rows_that_nobody_expects_are_named():
    parts = exchange(0, (4, 5), (4, 3)), exchange(1, (2, 4), (5, 4))
    (finding,) = findings(ExchangeMismatch, unfit(*parts))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert "rank 1 sends 2 rows to rank 0, which expects 3" in finding.message
    assert "rows for the ranks of the group: [4, 5]" in finding.evidence[0].summary


@pytest.mark.parametrize(
    "parts",
    [
        (exchange(0, (4, 5), (4, 2)), exchange(1, (2, 4), (5, 4))),
        (exchange(0, (6, 6), (6, 6), even=True), exchange(1, (8, 8), (8, 8), even=True)),
        (exchange(0, (4, 4), (4, 4), even=True), exchange(1, (4, 4), (4, 4))),
        (exchange(0, (0, 8), (0, 6)), exchange(1, (6, 0), (8, 0))),
        (exchange(0, (5, 0), (5, 2)), exchange(1, (2, 0), (0, 0))),
        (exchange(0, (0, 0), (0, 0)), exchange(1, (0, 9), (0, 9))),
    ],
    ids=[
        "uneven",
        "unequal capacities",
        "equal splits on one rank only",
        "all to the other",
        "a rank that gets none",
        "own only",
    ],
)
def test_splits_of_correct_programs_are_silent(parts):
    assert not findings(ExchangeMismatch, unfit(*parts))


def test_tokens_that_do_not_come_back_are_reported():
    (finding,) = findings(ExchangeMismatch, trip(there=((20, 20), (18, 18)), back=((8, 8), (9, 9))))
    assert finding.severity is Severity.WARNING
    assert "it sent 40 rows and gets 18 back; it got 36 rows and sends 16 back" in finding.message


@pytest.mark.parametrize(
    ("there", "back"),
    [(((20, 20), (18, 17)), ((18, 17), (20, 20))), (((32, 32), (30, 30)), ((16, 16), (16, 16)))],
    ids=["undone", "outputs summed up for each token"],
)
def test_ways_back_of_correct_programs_are_silent(there, back):
    assert not findings(ExchangeMismatch, trip(there, back))
