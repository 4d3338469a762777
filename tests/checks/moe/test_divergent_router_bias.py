import pytest

from distdiag.checks.moe.divergent_router_bias import DivergentRouterBias
from distdiag.checks.rep.replica_drift import ReplicaDrift
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.models import RouterBiasReplicas, StepReplicas
from tests.checks.models import differing, replicas
from tests.checks.verdicts import findings


def bias(**values):
    values = {"name": "moe.expert_bias", "is_parameter": False, "is_routing_bias": True, **values}
    return differing(0.1, 0.3, **values)


def drifted(*tensors, check=DivergentRouterBias, **values):
    values = {"step": 2, "alike_at": 1, "kind": RouterBiasReplicas, **values}
    return findings(check, replicas(*tensors, moment=Moment.STEP, **values))


def test_a_bias_that_ranks_update_by_counts_of_their_own_is_reported():
    (finding,) = drifted(bias())
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.subjects == ("moe.expert_bias",)
    assert "until step 1, different before step 2" in finding.message


def test_a_bias_whose_router_is_seen_to_be_trained_together_is_reported():
    (finding,) = drifted(bias(), evidence=ReplicaEvidence.ROUTER)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)


def test_other_buffers_may_differ():
    assert not drifted(bias(is_routing_bias=False))


def test_a_bias_that_is_a_frozen_parameter_is_reported_once():
    assert drifted(bias(is_parameter=True))
    assert not drifted(bias(is_parameter=True), check=ReplicaDrift, kind=StepReplicas)


@pytest.mark.parametrize(
    "values",
    [{"alike_at": None}, {"evidence": ReplicaEvidence.WORLD}],
    ids=["never alike", "not kept together"],
)
def test_what_may_be_meant_is_silent(values):
    assert not drifted(bias(), **values)
