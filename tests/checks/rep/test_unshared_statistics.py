import pytest

from distdiag.checks.rep.unshared_statistics import UnsharedStatistics
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import differing, replicas
from tests.checks.verdicts import findings


def judged(**values):
    values = {"is_parameter": False, "requires_grad": False, **values}
    tensors = [differing(0.1, 0.4, name=f"norm.running_{n}", **values) for n in ("mean", "var")]
    view = replicas(*tensors, moment=Moment.EVALUATION, step=12)
    return findings(UnsharedStatistics, view)


def test_statistics_that_differ_in_an_evaluation_are_named():
    (finding,) = judged()
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert (finding.ranks, finding.location.line) == (RankSet([0, 1]), 20)
    assert finding.subjects == ("norm.running_mean", "norm.running_var")
    assert finding.message == (
        "norm.running_mean and 1 more of DDP Net: ranks 0-1 evaluate with different running "
        "statistics after step 12"
    )


@pytest.mark.parametrize("evidence", [ReplicaEvidence.WORLD, ReplicaEvidence.BYPASSED])
def test_those_of_models_that_nothing_keeps_alike_are_silent(evidence):
    assert not judged(evidence=evidence)
