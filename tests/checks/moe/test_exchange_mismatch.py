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


def test_splits_that_fit_are_silent():
    parts = exchange(0, (4, 5), (4, 2)), exchange(1, (2, 4), (5, 4))
    assert not findings(ExchangeMismatch, unfit(*parts))


@pytest.mark.parametrize(
    "parts",
    [
        (exchange(0, (4, 4), (4, 4), even=True), exchange(1, (4, 4), (4, 4))),
        (exchange(0, (0, 8), (0, 6)), exchange(1, (6, 0), (8, 0))),
        (exchange(0, (5, 0), (5, 2)), exchange(1, (2, 0), (0, 0))),
        (exchange(0, (0, 0), (0, 0)), exchange(1, (0, 9), (0, 9))),
    ],
    ids=["equal splits on one rank only", "all to the other", "a rank that gets none", "own only"],
)
def test_splits_of_correct_programs_are_silent(parts):
    assert not findings(ExchangeMismatch, unfit(*parts))


def test_unequal_capacities_are_left_to_another_check():
    parts = exchange(0, (6, 6), (6, 6), even=True), exchange(1, (8, 8), (8, 8), even=True)
    assert not findings(ExchangeMismatch, unfit(*parts))


def test_tokens_that_do_not_come_back_are_told():
    (finding,) = findings(ExchangeMismatch, trip(there=((20, 20), (18, 18)), back=((8, 8), (9, 9))))
    assert finding.severity is Severity.WARNING
    assert "it sent 40 rows and gets 18 back; it got 36 rows and sends 16 back" in finding.message


def test_a_way_back_that_undoes_the_way_there_is_silent():
    closed = trip(there=((20, 20), (18, 17)), back=((18, 17), (20, 20)))
    assert not findings(ExchangeMismatch, closed)


def test_outputs_that_are_summed_up_for_each_token_are_silent():
    summed = trip(there=((32, 32), (30, 30)), back=((16, 16), (16, 16)))
    assert not findings(ExchangeMismatch, summed)
