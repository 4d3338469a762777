from distdiag.checks.shd.optimizer_before_sharding import OptimizerBeforeSharding
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

STALE = {"num_foreign": 4, "replaced": ("layer.weight", "layer.bias")}


def test_the_parameters_that_it_should_hold_are_named():
    (finding,) = findings(OptimizerBeforeSharding, optimizers(STALE, STALE))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.PROVEN)
    assert (finding.severity, finding.subjects) == (Severity.ERROR, ("layer.weight", "layer.bias"))
    assert finding.message == (
        "AdamW holds 4 parameters that no model has any more; layer.weight and 1 more have "
        "gradients and no optimizer"
    )


def test_only_the_ranks_concerned_are_named():
    (finding,) = findings(OptimizerBeforeSharding, optimizers({}, STALE))
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 41)


def test_a_healthy_optimizer_is_silent():
    assert not findings(OptimizerBeforeSharding, optimizers({}, {}))


def test_parameters_outside_of_models_are_silent_while_nothing_was_replaced():
    foreign = {"num_foreign": 2}
    assert not findings(OptimizerBeforeSharding, optimizers(foreign, foreign))
