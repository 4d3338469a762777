import pytest

from distdiag.checks.rep.replica_drift import ReplicaDrift
from distdiag.events.models import Basis, Moment
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
    assert "the same on ranks 0-2 until step 1, and different before step 2" in finding.message


def test_two_ranks_are_both_named_and_neither_is_surely_wrong():
    (finding,) = drifted(differing(0.1, 0.3))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


def test_what_is_not_marked_as_a_part_and_was_alike_has_drifted():
    (finding,) = drifted(differing(0.1, 0.1, 0.3), basis=Basis.MARKED)
    assert finding.severity is Severity.ERROR


def test_a_router_that_is_marked_as_a_part_of_experts_has_drifted():
    (finding,) = drifted(differing(0.1, 0.1, 0.3), basis=Basis.LAYER)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "routes to experts of all of them" in finding.evidence[-1].summary


def test_what_was_never_alike_has_not_drifted():
    assert not drifted(differing(0.1, 0.3), alike_at=None)


def test_what_was_alike_at_step_0_has_drifted():
    assert drifted(differing(0.1, 0.3), alike_at=0)


def test_running_statistics_of_batch_norm_are_silent():
    assert not drifted(differing(0.1, 0.3, name="bn.running_mean", is_parameter=False))


def test_running_statistics_do_not_hide_a_parameter():
    buffer = differing(0.1, 0.3, name="bn.running_mean", is_parameter=False)
    (finding,) = drifted(buffer, differing(0.1, 0.3))
    assert finding.subjects == ("layer.weight",)


def test_local_steps_of_ddp_may_be_meant():
    (finding,) = drifted(differing(0.1, 0.1, 0.3, basis=Basis.UNSYNCED))
    assert (finding.ranks, finding.grade) == (RankSet([2]), Grade.NOTE)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize("basis", [Basis.WORLD, Basis.BESIDE, Basis.SENT])
def test_ranks_that_nobody_keeps_alike_may_part(basis):
    assert not drifted(differing(0.1, 0.3), basis=basis)
