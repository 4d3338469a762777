import pytest

from distdiag.checks.seq.attention_context import AttentionContext
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import Context
from distdiag.findings.finding import Grade, Severity
from tests.checks.token_traces import HALVES, LENGTH, spec, token_traces
from tests.checks.verdicts import findings


def attending(context_of, of=None):
    """What is found when each token attends over what this function returns."""
    contexts = [[context_of(token) for token in half] for half in HALVES]
    return findings(AttentionContext, token_traces(HALVES, contexts=contexts, of=of or spec()))


def to_all(token):
    return Context(token, ((0, LENGTH, 1),))


def to_own_half(token):
    begin = token // 4 * 4
    return Context(token, ((begin, begin + 4, 1),))


def test_tokens_of_other_ranks_that_are_not_seen():
    first, second = attending(to_own_half)
    assert (first.severity, first.grade) == (Severity.ERROR, Grade.PROVEN)
    assert (first.ranks, second.ranks) == (RankSet([0]), RankSet([1]))
    assert first.location.line == 30
    assert "token 0 does not attend to 4-7; wrong are tokens 0-3" in first.message


@pytest.mark.parametrize(
    ("context_of", "of", "words"),
    [
        (to_all, spec(is_causal=True), "token 0 attends to 1-7, which it must not see"),
        (to_all, spec(documents=(3, 5)), "token 0 attends to 3-7, which it must not see"),
        (
            lambda token: Context(token, ((0, 4, 2), (4, 8, 1))),
            None,
            "attends to 0-3 more than once",
        ),
        (
            lambda token: Context(token, ((0, 8, 1),), padding=0.2),
            None,
            "gives 20% of its attention to padding",
        ),
        (
            lambda token: Context(token, ((0, 8, 1),), is_mixed=True, heads=(1,)),
            None,
            "gets values of a different head or row (in head 1)",
        ),
    ],
)
def test_a_wrong_context_says_what_is_wrong_with_it(context_of, of, words):
    assert words in attending(context_of, of)[0].message


def test_only_the_rank_without_a_mask_is_named():
    (finding,) = attending(
        lambda token: Context(token, ((0, token + 1 if token < 4 else 8, 1),)),
        spec(is_causal=True),
    )
    assert finding.ranks == RankSet([1])
    assert "wrong are tokens 4-6" in finding.message


@pytest.mark.parametrize(
    "of", [spec(), spec(is_causal=True), spec(documents=(3, 5), is_causal=True)]
)
def test_the_context_that_is_due_is_silent(of):
    def due(token):
        places = of.context(token)
        return Context(token, ((places[0], places[-1] + 1, 1),))

    assert not attending(due, of)
