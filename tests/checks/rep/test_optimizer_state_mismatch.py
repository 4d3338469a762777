import math

import pytest

from distdiag.checks.rep.optimizer_state_mismatch import OptimizerStateMismatch
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

OTHER = {"learning_rates": (0.05,), "least_count": 1, "greatest_count": 1}
RATE = {"learning_rates": (0.05,)}
FRESH = {"least_count": -1, "greatest_count": -1}
FOUND = {
    "another rate": (
        [{}, {}, RATE],
        [2],
        "different learning rates: 0.1 on ranks 0-1, 0.05 on rank 2",
    ),
    "did not resume": (
        [{}, FRESH, {}],
        [1],
        "different step counters in its state: 3 on ranks 0,2, none on rank 1",
    ),
    "two ranks": ([{}, RATE], [0, 1], "0.1 on rank 0, 0.05 on rank 1"),
    "rates before counters": ([{}, OTHER], [0, 1], "learning rates"),
    "the second group of parameters": (
        [{"learning_rates": (0.1, 0.1)}, {"learning_rates": (0.1, 0.2)}],
        [0, 1],
        "0.1 on rank 0, 0.1/0.2 on rank 1",
    ),
}


@pytest.mark.parametrize(("changes", "ranks", "words"), FOUND.values(), ids=FOUND)
def test_the_ranks_that_differ_are_named(changes, ranks, words):
    (finding,) = findings(OptimizerStateMismatch, optimizers(*changes))
    assert (finding.ranks, finding.grade) == (RankSet(ranks), Grade.LIKELY)
    assert (finding.severity, finding.location.line) == (Severity.WARNING, 40 + min(ranks))
    assert words in finding.message


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"learning_rates": (math.nan,)},
        {"learning_rates": ()},
        {"least_count": -1, "greatest_count": -1},
        {"least_count": 2, "greatest_count": 5},
    ],
    ids=str,
)
def test_the_same_on_all_ranks_is_silent(change):
    assert not findings(OptimizerStateMismatch, optimizers(change, change))


def changed(*changes):
    """An optimizer whose rate was another from these steps on."""
    return {"rate_changes": tuple((s, (r,)) for s, r in changes), "rate_history": hash(changes)}


def test_rates_that_have_differed_meanwhile():
    halved = changed((0, 0.2), (24, 0.1))
    (finding,) = findings(OptimizerStateMismatch, optimizers(halved, changed((0, 0.2), (32, 0.1))))
    assert "took step 24 of" in finding.message
    assert "different learning rates: 0.1 on rank 0, 0.2 on rank 1" in finding.message
    assert finding.step == 24


def test_rates_that_were_the_same_at_all_steps_that_are_known_are_silent():
    long, short = changed((0, 0.3), (8, 0.2), (24, 0.1)), changed((8, 0.2), (24, 0.1))
    assert not findings(OptimizerStateMismatch, optimizers(long, short))
    assert not findings(OptimizerStateMismatch, optimizers(long, long))


def test_different_numbers_of_gradients_are_left_to_other_checks():
    assert not findings(OptimizerStateMismatch, optimizers({}, {"num_without_gradient": 2}))


def test_ranks_of_which_nothing_tells_that_they_train_together_are_not_compared():
    assert not findings(
        OptimizerStateMismatch, optimizers({"members": ()}, {**OTHER, "members": ()})
    )


def test_a_rank_that_is_no_member_is_left_out():
    pair = {"members": (0, 1)}
    assert not findings(OptimizerStateMismatch, optimizers(pair, pair, {**OTHER, "members": ()}))
    states = optimizers(pair, {**OTHER, **pair}, {"learning_rates": (0.7,), "members": ()})
    (finding,) = findings(OptimizerStateMismatch, states)
    assert finding.ranks == RankSet([0, 1])
    assert finding.message.endswith("0.1 on rank 0, 0.05 on rank 1")


def test_a_member_that_does_not_know_the_others_is_compared():
    states = optimizers({"members": (0, 1)}, {**OTHER, "members": ()})
    assert findings(OptimizerStateMismatch, states)
