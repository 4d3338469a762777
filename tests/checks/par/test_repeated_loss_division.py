import pytest

from distdiag.checks.par.repeated_loss_division import RepeatedLossDivision
from distdiag.findings.finding import Grade, Severity
from distdiag.views.losses import CombinedLossView
from tests.checks.losses import losses, mean, over, part, times
from tests.checks.streams import Program
from tests.checks.verdicts import findings

TWICE = [mean(20, over(4), over(4))] * 4
AGAIN = [part(10, 2 / 80 / 4, over(4), times(2), over(80))] * 4
RANKS = [part(20, 1 / 40, over(40))]


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        (TWICE, "divided twice by the 4 micro-steps of a step: the weights of its elements add up"),
        ([mean(20, over(2), over(2))] * 2, "divided twice by the 2 micro-steps of a step"),
        (AGAIN, "of the whole step, and again by its 4 micro-steps"),
        ([part(10, 1 / 80 / 4, over(80), over(4))] * 4, "its elements add up to 0.125"),
        ([part(10, 1 / 40 / 4, over(40), over(4))] * 4, "its elements add up to 0.25"),
        (RANKS, "of all 2 ranks, but the gradients are also averaged over these ranks"),
    ],
    ids=["twice", "twice by two", "after a count", "and ranks", "after a count of a rank", "ranks"],
)
def test_a_division_too_many_is_found(passes, words):
    (finding,) = findings(RepeatedLossDivision, losses(passes, passes))
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert words in finding.message


@pytest.mark.parametrize(
    "passes",
    [
        [mean(20, over(4))] * 4,
        [mean(20)] * 4,
        [mean(20, times(0.25), over(4))] * 4,
        [mean(20, over(2, num_terms=2), over(2))] * 2,
        [mean(20, over(2, num_terms=3), over(2))] * 2,
        [part(10, 2 / 80, times(2), over(80))] * 4,
        [part(10, 1 / 10 / 4, over(10), over(4))] * 4,
        [mean(20, over(4), times(1024), over(4))] * 4,
        [mean(20, over(2), over(2))] * 4,
        [mean(20, times(0.5))],
        [part(20, 1 / 50, over(50))],
        [mean(20, over(4), over(4)), *[mean(20, over(4))] * 3],
        [mean(20, over(4), over(4)), None],
    ],
)
def test_other_divisions_are_silent(passes):
    assert not findings(RepeatedLossDivision, losses(passes, passes))


def test_gradients_that_are_summed_over_ranks_need_the_global_count():
    assert not findings(RepeatedLossDivision, losses(RANKS, RANKS, divisor=1.0))


def test_gradients_that_are_multiplied_afterwards_need_it_too():
    assert not findings(RepeatedLossDivision, losses(RANKS, RANKS, is_multiplied=True))


@pytest.mark.parametrize("options", [{"has_wrapper": False}, {"divisor": 0.0}], ids=str)
def test_nothing_is_said_where_it_is_not_known_who_averages(options):
    assert not findings(RepeatedLossDivision, losses(TWICE, TWICE, **options))


def test_the_half_of_a_squared_error_may_be_meant():
    passes = [mean(20, over(2), over(2), kind="dense")] * 2
    (finding,) = findings(RepeatedLossDivision, losses(passes, passes))
    assert finding.grade is Grade.NOTE


def test_one_step_is_a_note():
    (finding,) = findings(RepeatedLossDivision, losses(TWICE, TWICE, num_steps=1))
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize("is_measured", [True, False])
def test_gradients_that_are_averaged_by_hand_are_judged_the_same_way(is_measured):
    view = losses(RANKS, RANKS, is_measured=is_measured, kind=CombinedLossView)
    assert [each.grade for each in findings(RepeatedLossDivision, view)] == [
        Grade.LIKELY
    ] * is_measured


def dividing(folder, line, num_passes):
    """A program that starts its passes from this line."""
    passes = [mean(20, over(2))] * num_passes
    return losses(passes, passes, site=Program(folder, line).site(line))


BY_RANKS = "(loss / dist.get_world_size()).backward()"


def test_a_mean_over_ranks_that_is_divided_by_their_number_is_found(tmp_path):
    (finding,) = findings(RepeatedLossDivision, dividing(tmp_path, BY_RANKS, 1))
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "is divided by 2, the number of ranks, but the gradients are also" in finding.message


@pytest.mark.parametrize("line", ["(loss / 2).backward()", "(loss / parts).backward()"])
def test_a_divisor_that_may_count_something_else_is_a_note(tmp_path, line):
    (finding,) = findings(RepeatedLossDivision, dividing(tmp_path, line, 1))
    assert finding.grade is Grade.NOTE


def test_as_many_micro_steps_as_ranks_may_divide_it(tmp_path):
    assert not findings(RepeatedLossDivision, dividing(tmp_path, BY_RANKS, 2))


@pytest.mark.parametrize("options", [{"divisor": 1.0}, {"is_multiplied": True}], ids=str)
def test_a_mean_over_ranks_that_nobody_else_takes_is_silent(options):
    passes = [mean(20, over(2))]
    assert not findings(RepeatedLossDivision, losses(passes, passes, **options))
