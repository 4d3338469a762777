"""Tests of gradients of split attention beside those of plain attention."""

from distdiag.checks.seq.attention_gradient import AttentionGradient
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.token_traces import HALVES, own_half, spec, token_traces
from tests.checks.verdicts import findings

DUE = ((1.0, -2.0, 3.0, 1.0, 2.0, -1.0, 1.0, 2.0),) * 3


def of_rank(rank, values, factor=1.0):
    return tuple(
        factor * value if token in HALVES[rank] else 0.0 for token, value in enumerate(values)
    )


def found(keys=DUE[1], *, factor=1.0, dues=(DUE, DUE)):
    gradients = [
        tuple(of_rank(rank, values, factor) for values in (DUE[0], keys, DUE[2])) for rank in (0, 1)
    ]
    view = token_traces(
        HALVES,
        scales=[own_half(rank, factor) for rank in (0, 1)],
        of=spec(reduction="sum" if factor == 1 else "mean"),
        gradients=gradients,
        due_gradients=dues,
    )
    return findings(AttentionGradient, view)


def test_another_gradient_behind_a_right_output_is_an_error_with_its_tokens():
    (finding,) = found((1.0, -2.0, 3.0, 1.0, 4.0, -1.0, 0.5, 2.0))
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.PROVEN)
    assert "at tokens 4,6, that of keys by 0.41 of itself" in finding.message
    assert finding.ranks == RankSet([0, 1])


def test_gradients_of_plain_attention_are_silent_whatever_split_and_gather_multiply_them_by():
    assert not found()
    assert not found(factor=2.0)


def test_rounding_is_silent():
    assert not found(tuple(value * 1.001 for value in DUE[1]))


def test_attention_whose_output_is_not_the_plain_one_is_not_judged():
    wrong = (9.0,) * 8
    assert not found(wrong, dues=(DUE, ()))
    assert not found(wrong, dues=((), ()))
