from dataclasses import replace

import pytest

from distdiag.checks.shd.unreduced_gradient import UnreducedGradient
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.gradients import SameWorkView
from tests.checks.models import differing, replicas
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings


def gradients(*tensors, **values):
    return findings(UnreducedGradient, replicas(*tensors, moment=Moment.GRADIENT, **values))


def test_all_copies_are_named_even_against_a_majority():
    (finding,) = gradients(
        differing(0.1, 0.1, 0.3, wrapper="", evidence=ReplicaEvidence.MESH), step=1
    )
    assert (finding.ranks, finding.grade) == (RankSet([0, 1, 2]), Grade.PROVEN)
    assert finding.severity is Severity.ERROR
    assert "ranks 0-2, which hold copies of it, when step 1 begins" in finding.message


@pytest.mark.parametrize(
    ("evidence", "alike_at", "grades"),
    [
        (ReplicaEvidence.WRAPPER, None, [Grade.PROVEN]),
        (ReplicaEvidence.REDUCED, None, [Grade.PROVEN]),
        (ReplicaEvidence.MODEL, None, [Grade.LIKELY]),
        (ReplicaEvidence.MARKED, 0, [Grade.LIKELY]),
        (ReplicaEvidence.MARKED, None, [Grade.NOTE]),
        (ReplicaEvidence.LONE, 0, [Grade.LIKELY]),
        (ReplicaEvidence.LONE, None, [Grade.NOTE]),
        (ReplicaEvidence.UNSYNCED, None, [Grade.NOTE]),
        (ReplicaEvidence.OTHER_GROUPS, 0, []),
        (ReplicaEvidence.WORLD, None, []),
        (ReplicaEvidence.FROZEN, None, []),
        (ReplicaEvidence.SENT, None, []),
    ],
)
def test_the_reason_to_compare_decides_how_sure_it_is(evidence, alike_at, grades):
    found = gradients(differing(0.1, 0.3, wrapper="", evidence=evidence), alike_at=alike_at)
    assert [finding.grade for finding in found] == grades


def test_ddp_over_a_group_of_one_is_said_to_be_so():
    (finding,) = gradients(differing(0.1, 0.5, evidence=ReplicaEvidence.LONE), alike_at=0)
    assert finding.severity is Severity.WARNING
    assert "a group of one rank" in finding.evidence[-1].summary


def test_steps_that_may_be_local_on_purpose_need_no_fix():
    (meant,) = gradients(differing(0.1, 0.3, evidence=ReplicaEvidence.UNSYNCED))
    assert meant.fix.startswith("Nothing, if the ranks are to step by themselves")
    (wrong,) = gradients(differing(0.1, 0.3, evidence=ReplicaEvidence.WRAPPER))
    assert wrong.fix.startswith("All-reduce")


def test_late_parameters_are_left_to_the_check_for_them():
    assert not gradients(differing(0.1, 0.3, is_late=True))


@pytest.mark.parametrize("evidence", [ReplicaEvidence.UNSYNCED, ReplicaEvidence.OTHER_GROUPS])
def test_ranks_that_exchange_nothing_in_many_steps_are_an_alarm(evidence):
    view = replicas(differing(0.1, 0.3, evidence=evidence), moment=Moment.GRADIENT, alike_at=0)
    (finding,) = findings(UnreducedGradient, replace(view, num_unsynced_steps=2000))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "in 2000 steps nothing as large was exchanged" in finding.message


def same_work(apart, equal):
    view = SameWorkView("Net", (0, 1), apart, equal, 3, step=0, site=plain_site(12))
    return findings(UnreducedGradient, view)


def test_ranks_that_are_given_the_same_and_get_other_gradients_are_reported():
    (finding,) = same_work(("first.weight", "second.weight"), ("norm.weight", "a", "b"))
    assert finding.subjects == ("first.weight", "second.weight")
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "are given the same inputs and exchange activations" in finding.message
    assert finding.location.line == 12


@pytest.mark.parametrize(
    ("apart", "equal"), [((), ("a", "b", "c")), (("first.weight",), ("a", "b"))]
)
def test_gradients_that_are_the_same_or_of_which_few_are_tell_nothing(apart, equal):
    assert not same_work(apart, equal)
