from dataclasses import replace

import pytest

from distdiag.checks.shd.unreduced_gradient import UnreducedGradient
from distdiag.events.models import Basis, Moment
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import differing, replicas
from tests.checks.verdicts import findings


def gradients(*tensors, **values):
    return findings(UnreducedGradient, replicas(*tensors, moment=Moment.GRADIENT, **values))


def test_all_copies_are_named_even_against_a_majority():
    (finding,) = gradients(differing(0.1, 0.1, 0.3, keeper="", basis=Basis.MESH), step=1)
    assert (finding.ranks, finding.grade) == (RankSet([0, 1, 2]), Grade.PROVEN)
    assert finding.severity is Severity.ERROR
    assert "ranks 0-2, which hold copies of it, when step 1 begins" in finding.message


def test_a_part_of_a_sharded_model_that_is_not_sharded_is_likely_meant_to_be_reduced():
    (finding,) = gradients(differing(0.1, 0.3, keeper="", basis=Basis.MODEL))
    assert finding.grade is Grade.LIKELY


@pytest.mark.parametrize(("alike_at", "grade"), [(None, Grade.NOTE), (0, Grade.LIKELY)])
def test_what_is_not_marked_as_a_part_must_have_been_alike(alike_at, grade):
    tensor = differing(0.1, 0.3, keeper="", basis=Basis.MARKED)
    (finding,) = gradients(tensor, alike_at=alike_at)
    assert finding.grade is grade


def test_local_steps_of_ddp_may_be_meant():
    (finding,) = gradients(differing(0.1, 0.3, basis=Basis.UNSYNCED))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_gradients_that_ddp_has_reduced_and_that_differ_are_not_meant():
    (finding,) = gradients(differing(0.1, 0.3, keeper="DDP", basis=Basis.WRAPPER))
    assert (finding.grade, finding.severity) == (Grade.PROVEN, Severity.ERROR)


def test_gradients_that_the_program_reduced_itself_are_not_meant_to_differ():
    (finding,) = gradients(differing(0.1, 0.3, keeper="", basis=Basis.REDUCED))
    assert finding.grade is Grade.PROVEN


@pytest.mark.parametrize("basis", [Basis.WORLD, Basis.BESIDE, Basis.SENT])
def test_ranks_that_nobody_keeps_alike_have_gradients_of_their_own(basis):
    assert not gradients(differing(0.1, 0.3), basis=basis)


def test_late_parameters_are_left_to_the_check_for_them():
    assert not gradients(differing(0.1, 0.3, is_late=True))


@pytest.mark.parametrize(
    ("alike_at", "severity"), [(0, Severity.WARNING), (None, Severity.INFO)], ids=["alike", "never"]
)
def test_ddp_over_a_group_of_one_is_an_alarm_where_ranks_began_alike(alike_at, severity):
    lone = differing(0.1, 0.5, basis=Basis.LONE)
    view = replicas(lone, moment=Moment.GRADIENT, alike_at=alike_at)
    (finding,) = findings(UnreducedGradient, view)
    assert finding.severity is severity
    assert "a group of one rank" in finding.evidence[-1].summary


@pytest.mark.parametrize("basis", [Basis.UNSYNCED, Basis.SIBLING])
def test_ranks_that_exchange_nothing_in_many_steps_are_an_alarm(basis):
    view = replicas(differing(0.1, 0.3, basis=basis), moment=Moment.GRADIENT, alike_at=0)
    (finding,) = findings(UnreducedGradient, replace(view, apart_for=2000))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "in 2000 steps nothing as large was exchanged" in finding.message


def test_a_stage_beside_one_that_reduces_is_silent_at_first():
    assert not gradients(differing(0.1, 0.3, basis=Basis.SIBLING), alike_at=0)
