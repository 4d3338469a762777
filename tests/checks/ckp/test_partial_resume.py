import pytest

from distdiag.checks.ckp.partial_resume import PartialResume
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.loads import resumed
from tests.checks.streams import together
from tests.checks.verdicts import findings


def found(**values):
    return findings(PartialResume, together(*(resumed(rank, **values) for rank in (0, 1))))


def test_a_schedule_that_goes_on_with_a_new_optimizer_is_a_warning():
    (finding,) = found()
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert finding.ranks == RankSet([0, 1])
    assert "its schedule (at step 3)" in finding.message


def test_a_state_that_went_to_an_optimizer_that_never_steps_is_a_warning():
    (finding,) = found(num_lost=6, schedule_step=-1, num_loaded=0)
    assert finding.severity is Severity.WARNING
    assert "a different optimizer, which never stepped" in finding.message


def test_a_state_that_was_not_asked_for_is_a_warning():
    (finding,) = found(num_left_out=6, num_loaded=0, offered=-1, schedule_step=-1)
    assert finding.severity is Severity.WARNING
    assert "holds 6 entries of it, which were not asked for" in finding.message


def restored(*made):
    """Ranks whose optimizer was given a state, and made that of so many parameters anew."""
    events = [
        resumed(rank, was_restored=True, num_stateless=3, num_made=number)
        for rank, number in enumerate(made)
    ]
    return findings(PartialResume, together(*events))


def test_a_state_that_holds_what_one_rank_keeps_is_a_warning():
    (finding,) = restored(0, 3)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([1]))
    assert "on rank 0 alone: it begins anew for 3 of 6 parameters on rank 1" in finding.message
    assert "for 3 of 6 parameters" in finding.evidence[0].summary


@pytest.mark.parametrize("made", [(0, 0), (3, 3), (0, 0, 3), (0,)], ids=str)
def test_a_state_that_is_loaded_alike_is_silent(made):
    assert not restored(*made)


def test_a_fine_tuning_from_a_file_with_more_in_it_is_a_note():
    (finding,) = found(schedule_step=-1)
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize(
    "values",
    [
        {"was_restored": True, "num_stateless": 0},
        {"num_stateless": 0},
        {"num_loaded": 0},
        {"offered": -1, "schedule_step": -1},
        {"offered": 0},
    ],
)
def test_a_whole_resume_and_a_training_from_scratch_are_silent(values):
    assert not found(**values)
