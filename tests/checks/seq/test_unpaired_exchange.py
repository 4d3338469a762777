import pytest

from distdiag.checks.seq.unpaired_exchange import UnpairedExchange
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.sequences import both, passed, shared, use
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings


def judged(*passes, **values):
    return findings(UnpairedExchange, shared(*passes, **values))


def test_a_layer_that_brings_nothing_back_is_named():
    (finding,) = judged(both(0, is_returned=False), both(1, is_returned=False))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert "do not exchange its output afterwards" in finding.message
    assert "3 all-to-alls before attention" in finding.evidence[0].summary


def test_a_rank_that_differs_is_named_alone():
    def one(number):
        return [passed(0, number), passed(1, number, is_returned=False)]

    (finding,) = judged(one(0), one(1))
    assert finding.ranks == RankSet([1])
    assert "while rank 0 do" in finding.message


def test_the_layer_that_is_wrong_is_reported_from_the_one_that_is_right():
    def two(number):
        return [
            passed(rank, number, use(rank, number),
                   use(rank, number, is_returned=False, site=plain_site(60)))
            for rank in (0, 1)
        ]  # fmt: skip

    (finding,) = judged(two(0), two(1))
    assert finding.location.line == 60


@pytest.mark.parametrize(
    ("passes", "how"),
    [
        ([both(0), both(1)], "all_to_all"),
        ([both(0, is_returned=False)], "all_to_all"),
        ([both(0, is_returned=False), both(1)], "all_to_all"),
        ([both(n, how="ring", is_returned=False) for n in (0, 1)], "ring"),
    ],
    ids=["pairs", "one pass", "now and then", "a ring"],
)
def test_pairs_and_what_says_nothing_are_silent(passes, how):
    assert not judged(*passes, how=how)
