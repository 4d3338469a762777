import pytest

from distdiag.checks.rep.replica_drift import ReplicaDrift
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import differing, replicas
from tests.checks.verdicts import findings


def drifted(*tensors, **values):
    values = {"moment": Moment.STEP, "step": 2, "alike_at": 1, **values}
    return findings(ReplicaDrift, replicas(*tensors, **values))


def test_the_rank_that_went_its_own_way_is_named():
    (finding,) = drifted(differing(0.1, 0.1, 0.3))
    assert (finding.ranks, finding.grade) == (RankSet([2]), Grade.PROVEN)
    assert finding.severity is Severity.ERROR
    assert "equal on ranks 0-2 until step 1, different before step 2" in finding.message


def test_two_ranks_are_both_named_and_neither_is_surely_wrong():
    (finding,) = drifted(differing(0.1, 0.3))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


def test_a_router_that_is_marked_as_a_part_of_experts_has_drifted():
    (finding,) = drifted(differing(0.1, 0.1, 0.3), evidence=ReplicaEvidence.LAYER)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "routes to experts of all of these ranks" in finding.evidence[-1].summary


@pytest.mark.parametrize(("alike_at", "num_findings"), [(None, 0), (0, 1)])
def test_only_what_was_alike_has_drifted(alike_at, num_findings):
    assert len(drifted(differing(0.1, 0.3), alike_at=alike_at)) == num_findings


def test_running_statistics_of_batch_norm_are_silent_and_hide_no_parameter():
    buffer = differing(0.1, 0.3, name="bn.running_mean", is_parameter=False)
    assert not drifted(buffer)
    (finding,) = drifted(buffer, differing(0.1, 0.3))
    assert finding.subjects == ("layer.weight",)


@pytest.mark.parametrize(
    ("evidence", "severities"),
    [
        (ReplicaEvidence.MARKED, [Severity.ERROR]),
        (ReplicaEvidence.UNSYNCED, [Severity.INFO]),
        (ReplicaEvidence.WORLD, []),
        (ReplicaEvidence.FROZEN, []),
        (ReplicaEvidence.SENT, []),
    ],
)
def test_the_reason_to_compare_decides_how_sure_it_is(evidence, severities):
    found = drifted(differing(0.1, 0.1, 0.3), evidence=evidence)
    assert [each.severity for each in found] == severities
    assert all(each.ranks == RankSet([2]) for each in found)


@pytest.mark.parametrize(
    ("evidence", "begin"),
    [
        (ReplicaEvidence.WRAPPER, "The gradients of these parameters are reduced, so look for"),
        (ReplicaEvidence.UNSYNCED, "Reduce the gradient over all ranks"),
        (ReplicaEvidence.MODEL, "Reduce the gradient over all ranks"),
    ],
)
def test_what_to_do_depends_on_whether_the_gradients_are_reduced(evidence, begin):
    (finding,) = drifted(differing(0.1, 0.3), evidence=evidence)
    assert finding.fix.startswith(begin)
