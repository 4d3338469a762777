import pytest

from distdiag.checks.seq.gather_gradient_scale import GatherGradientScale
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.token_traces import HALVES, LENGTH, own_half, spec, token_traces
from tests.checks.verdicts import findings


def found(scales, reduction="", **values):
    view = token_traces(HALVES, scales=scales, of=spec(reduction=reduction), **values)
    return findings(GatherGradientScale, view)


def owned(value=1.0):
    return [own_half(rank, value) for rank in (0, 1)]


def whole(value=1.0):
    return [[value] * LENGTH] * 2


def test_gradients_that_do_not_come_back_are_an_error():
    (finding,) = found([[0.0] * LENGTH] * 2)
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.PROVEN)
    assert "no gradient comes back to tokens 0-7 on any rank" in finding.message


def test_tokens_with_another_factor_are_named_with_their_rank():
    (finding,) = found([own_half(0), own_half(1, 3.0)])
    assert finding.ranks == RankSet([1])
    assert "the gradient of tokens 4-7 is 3 times that of others" in finding.message


def test_gradients_of_other_tokens_are_named():
    (finding,) = found([own_half(0), own_half(1, float("nan"))])
    assert finding.ranks == RankSet([1])
    assert "the gradient of tokens 4-7 is not that of its output" in finding.message


@pytest.mark.parametrize(
    ("scales", "reduction", "words"),
    [
        (owned(), "mean", "as they are instead of 2 times as large"),
        (owned(2.0), "sum", "2 times as large (once for each rank) instead of as they are"),
        (whole(), "sum", "instead of divided by 2 (the number of ranks)"),
        (whole(2.0), "none", "each rank gets all of them"),
    ],
)
def test_a_factor_that_contradicts_the_reduction_is_proven(scales, reduction, words):
    (finding,) = found(scales, reduction)
    assert finding.grade is Grade.PROVEN
    assert words in finding.message


@pytest.mark.parametrize("scales", [owned(2.0), whole(2.0), whole(0.5)])
def test_a_factor_without_a_known_reduction_is_a_note(scales):
    (finding,) = found(scales)
    assert finding.grade is Grade.NOTE
    assert "right if" in finding.message


@pytest.mark.parametrize(
    ("scales", "reduction"),
    [
        (owned(), "sum"),
        (owned(2.0), "mean"),
        (whole(), "none"),
        (whole(), "mean"),
        (whole(0.5), "sum"),
        (owned(), ""),
        (whole(), ""),
    ],
)
def test_a_factor_that_fits_is_silent(scales, reduction):
    assert not found(scales, reduction)


def test_values_whose_gradient_does_not_fit_who_attends_to_them_are_named():
    right = [float(LENGTH)] * LENGTH
    stale = [4.0] * 4 + [8.0] * 4
    attended = [[v / 2 for v in stale]] * 2
    (finding,) = found(owned(), "sum", attended=attended)
    assert "the values of tokens 0-3 get 0.5 times the gradient" in finding.message
    assert not found(owned(), "sum", attended=[[v / 2 for v in right]] * 2)
