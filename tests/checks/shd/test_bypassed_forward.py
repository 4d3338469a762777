import pytest

from distdiag.checks.shd.bypassed_forward import BypassedForward
from distdiag.checks.shd.unreduced_gradient import UnreducedGradient
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import differing, replicas
from tests.checks.verdicts import findings


def gradients(evidence=ReplicaEvidence.BYPASSED, moment=Moment.GRADIENT, **plan):
    return replicas(differing(0.1, 0.4, evidence=evidence, **plan), moment=moment, step=0)


def test_gradients_that_differ_since_ddp_was_bypassed():
    (finding,) = findings(BypassedForward, gradients())
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.PROVEN)
    assert (finding.ranks, finding.subjects) == (RankSet([0, 1]), ("layer.weight",))
    assert "not through DDP" in finding.message
    assert finding.location.line == 20


def test_one_cause_has_one_finding():
    assert not findings(UnreducedGradient, gradients())
    assert findings(UnreducedGradient, gradients(ReplicaEvidence.WRAPPER))


@pytest.mark.parametrize(
    "evidence",
    [evidence for evidence in ReplicaEvidence if evidence is not ReplicaEvidence.BYPASSED],
    ids=str,
)
def test_gradients_that_differ_for_another_reason_are_silent(evidence):
    assert not findings(BypassedForward, gradients(evidence))


def test_parameters_that_came_too_late_are_judged_elsewhere():
    assert not findings(BypassedForward, gradients(is_late=True))
