import pytest

from distdiag.checks.par.unequal_token_weights import UnequalTokenWeights
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.losses import LossView
from tests.checks.losses import losses, mean, over, part, times, window
from tests.checks.verdicts import findings


def test_means_over_the_own_tokens_of_ranks_are_found():
    (finding,) = findings(UnequalTokenWeights, losses([mean(30)], [mean(10)]))
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "3.0 times" in finding.message
    assert finding.ranks == RankSet([0, 1])
    assert [each.values["num_counted"] for each in finding.evidence] == [30, 10]
    assert finding.location.line == 50


def test_means_of_micro_steps_are_found_though_the_ranks_are_alike():
    passes = [mean(30, over(2)), mean(10, over(2))]
    (finding,) = findings(UnequalTokenWeights, losses(passes, passes))
    assert finding.grade is Grade.LIKELY


def test_a_count_of_all_micro_steps_of_each_rank_is_found():
    here = [part(20, 1 / 30), part(10, 1 / 30)]
    there = [part(5, 1 / 10), part(5, 1 / 10)]
    (finding,) = findings(UnequalTokenWeights, losses(here, there))
    assert finding.grade is Grade.LIKELY


@pytest.mark.parametrize(
    "passes",
    [
        ([part(30, 2 / 40, over(40), times(2))], [part(10, 2 / 40, over(40), times(2))]),
        ([mean(30)], [mean(30)]),
        ([mean(30)], [mean(28)]),
        ([mean(4, num_elements=4, num_rows=0)], [mean(2, num_elements=2, num_rows=0)]),
        ([mean(4, num_elements=48)], [mean(2, num_elements=24, num_rows=2)]),
        ([mean(30, kind="dense")], [mean(10, kind="dense")]),
        ([part(30, 0.5)], [part(10, 0.1)]),
        ([mean(30)], [None]),
        ([mean(30, place=0), mean(10, place=1)], [mean(30, place=0), mean(10, place=1)]),
    ],
    ids=[
        "global count",
        "equal counts",
        "nearly equal counts",
        "samples, uneven last batch",
        "one target in each row",
        "no tokens",
        "weights that are meant",
        "a rank that cannot be read",
        "two losses with passes of their own",
    ],
)
def test_other_weights_are_silent(passes):
    assert not findings(UnequalTokenWeights, losses(*passes))


@pytest.mark.parametrize(
    "options", [{"has_wrapper": False}, {"divisor": 0.0}, {"num_steps": 1}], ids=str
)
def test_it_is_a_note_where_little_is_known(options):
    (finding,) = findings(UnequalTokenWeights, losses([mean(30)], [mean(10)], **options))
    assert finding.grade is Grade.NOTE


def test_one_uneven_step_of_many_is_silent():
    steps = [window([mean(30)], [mean(30 if n else 10)], step=n) for n in range(4)]
    assert not findings(UnequalTokenWeights, LossView("AdamW", RankSet([0, 1]), tuple(steps)))


def test_counts_that_differ_as_by_chance_are_a_note():
    (finding,) = findings(UnequalTokenWeights, losses([mean(9)], [mean(5)]))
    assert finding.grade is Grade.NOTE


def test_a_rank_without_a_token_counts_for_nothing():
    assert not findings(UnequalTokenWeights, losses([mean(30)], [mean(0)]))


def test_the_mean_over_the_only_sequence_of_each_pass_is_a_note():
    first, second = mean(30, num_rows=1), mean(10, num_rows=1)
    (finding,) = findings(UnequalTokenWeights, losses([first], [second]))
    assert finding.severity is Severity.INFO
