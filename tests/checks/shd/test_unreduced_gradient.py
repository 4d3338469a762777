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


@pytest.mark.parametrize(
    ("basis", "alike_at", "grades"),
    [
        (Basis.WRAPPER, None, [Grade.PROVEN]),
        (Basis.REDUCED, None, [Grade.PROVEN]),
        (Basis.MODEL, None, [Grade.LIKELY]),
        (Basis.MARKED, 0, [Grade.LIKELY]),
        (Basis.MARKED, None, [Grade.NOTE]),
        (Basis.LONE, 0, [Grade.LIKELY]),
        (Basis.LONE, None, [Grade.NOTE]),
        (Basis.UNSYNCED, None, [Grade.NOTE]),
        (Basis.SIBLING, 0, []),
        (Basis.WORLD, None, []),
        (Basis.BESIDE, None, []),
        (Basis.SENT, None, []),
    ],
)
def test_the_reason_to_compare_decides_how_sure_it_is(basis, alike_at, grades):
    found = gradients(differing(0.1, 0.3, keeper="", basis=basis), alike_at=alike_at)
    assert [finding.grade for finding in found] == grades


def test_ddp_over_a_group_of_one_is_said_to_be_so():
    (finding,) = gradients(differing(0.1, 0.5, basis=Basis.LONE), alike_at=0)
    assert finding.severity is Severity.WARNING
    assert "a group of one rank" in finding.evidence[-1].summary


def test_late_parameters_are_left_to_the_check_for_them():
    assert not gradients(differing(0.1, 0.3, is_late=True))


@pytest.mark.parametrize("basis", [Basis.UNSYNCED, Basis.SIBLING])
def test_ranks_that_exchange_nothing_in_many_steps_are_an_alarm(basis):
    view = replicas(differing(0.1, 0.3, basis=basis), moment=Moment.GRADIENT, alike_at=0)
    (finding,) = findings(UnreducedGradient, replace(view, apart_for=2000))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "in 2000 steps nothing as large was exchanged" in finding.message
