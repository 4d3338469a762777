import pytest

from distdiag.checks.shd.stale_optimizer_state import StaleOptimizerState
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

STALE = {
    "num_stale_states": 4,
    "num_stateless": 2,
    "stateless": ("layer.weight", "layer.bias"),
    "num_parameters": 2,
}


def test_the_parameters_that_lost_their_history_are_named():
    (finding,) = findings(StaleOptimizerState, optimizers({}, STALE, STALE))
    assert (finding.ranks, finding.grade) == (RankSet([1, 2]), Grade.PROVEN)
    assert (finding.severity, finding.subjects) == (Severity.ERROR, ("layer.weight", "layer.bias"))
    assert finding.location.line == 41
    assert finding.message == (
        "AdamW has the state of 4 parameters that it does not hold, and none of layer.weight and "
        "1 more"
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_stale_states": 4},
        {"num_stateless": 1, "stateless": ("layer.weight",), "num_parameters": 1},
        {"num_stale_states": 4, "num_parameters": 0},
    ],
    ids=["healthy", "only-stale", "only-fresh", "no-parameters"],
)
def test_stale_or_fresh_alone_is_silent(change):
    assert not findings(StaleOptimizerState, optimizers(change, change))


def test_a_part_that_was_replaced_may_begin_anew():
    head = {**STALE, "num_parameters": 3}
    assert not findings(StaleOptimizerState, optimizers(head, head))


def test_parameters_that_are_more_than_the_stale_entries_are_new():
    grown = {**STALE, "num_stale_states": 1}
    assert not findings(StaleOptimizerState, optimizers(grown, grown))


def test_as_many_stale_entries_as_parameters_are_all_of_them():
    (finding,) = findings(StaleOptimizerState, optimizers({**STALE, "num_stale_states": 2}))
    assert finding.message.startswith("AdamW has the state of 2 parameters")
