import pytest

from distdiag.checks.seq.wrong_token_order import WrongTokenOrder
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import FOREIGN, MIXED
from distdiag.findings.finding import Grade, Severity
from tests.checks.token_traces import HALVES, token_traces
from tests.checks.verdicts import findings

HEAD_TAIL = [[0, 1, 6, 7], [2, 3, 4, 5]]


def joined(parts):
    return [[token for part in parts for token in part]] * 2


@pytest.mark.parametrize(
    ("parts", "seen", "words", "line"),
    [
        (HEAD_TAIL, joined(HEAD_TAIL), "in head-tail order, which is not undone", 20),
        (HALVES, joined(HALVES[::-1]), "with the parts in the order 1, 0", 20),
        (HALVES[::-1], joined(HALVES[::-1]), "rank 0: it has the part of rank 1", 10),
        (HALVES, [[*range(7, -1, -1)]] * 2, "in reverse order", 20),
        (HALVES, [[*range(3, 8), *range(3)]] * 2, "rotated by 3 tokens", 20),
        (HALVES, [[0, 2, 1, *range(3, 8)]] * 2, "token 2 is the first wrong one, at place 1", 20),
        (HALVES, [[FOREIGN] * 8] * 2, "places 0-7 held values that belong to no token", 20),
        (HALVES, [[MIXED] * 8] * 2, "places 0-7 held channels of several tokens", 20),
    ],
)
def test_a_wrong_order_says_which(parts, seen, words, line):
    (finding,) = findings(WrongTokenOrder, token_traces(parts, seen))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert finding.location.line == line
    assert words in finding.message


def test_another_dimension_that_is_joined_is_named():
    view = token_traces(HALVES, [[MIXED] * 4] * 2, gathered_shape=[(1, 4, 8)] * 2)
    (finding,) = findings(WrongTokenOrder, view)
    assert "it joins dim 2 instead of dim 1" in finding.message


def test_where_heads_may_come_before_tokens_it_is_a_note():
    view = token_traces(
        HALVES, [[MIXED] * 4] * 2, gathered_shape=[(1, 4, 8)] * 2, is_form_sure=[False] * 2
    )
    (finding,) = findings(WrongTokenOrder, view)
    assert (finding.severity, finding.grade) == (Severity.INFO, Grade.NOTE)
    assert "right if the program gives it heads before tokens" in finding.message


@pytest.mark.parametrize("parts", [HALVES, HEAD_TAIL, HALVES[::-1]])
def test_an_order_that_the_gather_undoes_is_silent(parts):
    assert not findings(WrongTokenOrder, token_traces(parts))
