import pytest

from distdiag.checks.stale_optimizer_state import StaleOptimizerState
from distdiag.finding import Grade, Severity
from distdiag.ranks import RankSet
from tests.checks.models import judged, optimizers

STALE = {"num_stale_states": 4, "stateless": ("layer.weight", "layer.bias")}


def test_the_parameters_that_lost_their_history_are_named():
    (finding,) = judged(StaleOptimizerState, optimizers({}, STALE, STALE))
    assert finding.ranks == RankSet([1, 2])
    assert finding.grade is Grade.PROVEN
    assert finding.severity is Severity.ERROR
    assert finding.subjects == ("layer.weight", "layer.bias")
    assert finding.location.line == 41
    assert finding.message == (
        "AdamW has the state of 4 parameters that it does not hold, and none of layer.weight and "
        "1 more"
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"num_stale_states": 4}, {"stateless": ("layer.weight",)}],
    ids=["healthy", "only-stale", "only-fresh"],
)
def test_stale_or_fresh_alone_is_silent(change):
    assert not judged(StaleOptimizerState, optimizers(change, change))
