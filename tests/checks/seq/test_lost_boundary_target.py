import pytest

from distdiag.checks.seq.lost_boundary_target import LostBoundaryTarget
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import model_fed
from tests.checks.losses import losses as steps
from tests.checks.losses import mean, reported
from tests.checks.sequences import both, shared
from tests.checks.verdicts import findings


def own_shift(number, **values):
    """Each rank shifts 2 rows of 10 tokens by itself."""
    fields = {"num_elements": 18, "num_rows": 2, "num_first": 2, "num_shifted": 18, **values}
    counted = fields.pop("num_counted", 18)
    return {rank: reported(rank, [mean(counted, **fields)], step=number) for rank in (0, 1)}


def judged(*losses, **values):
    seen = shared(both(0), both(1), losses=losses, **values)
    return findings(LostBoundaryTarget, seen)


def test_parts_that_are_shifted_by_themselves_are_named():
    (finding,) = judged(own_shift(0), own_shift(1))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert "the loss counts 36 targets, and 2 more were expected on rank 1" in finding.message


def test_labels_that_are_padded_before_the_shift_are_named_too():
    assert judged(*[own_shift(n, num_elements=20) for n in (0, 1)])


RIGHT = {
    "shifted before the split": {"num_counted": 20, "num_first": -1, "num_shifted": -1},
    "of the whole sequence": {"num_elements": 38, "num_counted": 38, "num_shifted": 38},
    "with the last token of the neighbour": {"num_counted": 18, "num_shifted": 20},
}


@pytest.mark.parametrize("values", RIGHT.values(), ids=RIGHT)
def test_labels_that_lose_none_are_right(values):
    assert not judged(*[own_shift(n, **{"num_elements": 20, **values}) for n in (0, 1)])


def test_one_step_is_not_enough():
    assert not judged(own_shift(0))


def masked(number, *first):
    """Like `own_shift`, with so many valid labels at the beginning of the parts."""
    both = own_shift(number), own_shift(number, num_first=0)
    return {rank: both[not first[rank]][rank] for rank in (0, 1)}


def test_prompts_at_the_beginning_may_be_masked():
    (finding,) = judged(masked(0, False, True), masked(1, False, True))
    assert "2 more were expected on rank 1" in finding.message


def test_parts_without_first_labels_lose_none():
    assert not judged(masked(0, True, False), masked(1, True, False))


def test_a_step_that_says_nothing_stands_against_nothing():
    assert judged(own_shift(0), masked(1, True, False), own_shift(2))
    unknown = {"num_elements": 20, "num_counted": 20, "num_first": -1, "num_shifted": -1}
    assert judged(own_shift(0), own_shift(1), own_shift(2, **unknown)) == []


def given(*counted):
    """The model is given 20 targets in 2 rows on each rank; the loss counts so many of them."""
    passes = [[mean(number, num_targets=20, num_target_rows=2)] for number in counted]
    return findings(LostBoundaryTarget, steps(*passes))


def test_targets_that_are_shifted_again_are_named():
    (finding,) = given(18, 20)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0]))
    assert "at step 2 it counts 18 targets there, and 20 were given" in finding.message


@pytest.mark.parametrize("counted", [(20, 20), (5, 5)], ids=["all count", "something else"])
def test_other_targets_are_right(counted):
    assert not given(*counted)


def test_texts_that_attend_to_gathered_ones_have_a_first_label_each():
    (finding,) = judged(own_shift(0), own_shift(1), how="all_gather")
    assert finding.severity is Severity.INFO


def test_parts_of_the_same_samples_are_named_where_keys_are_gathered():
    same = {"batch": "indices", "samples": ("samples",)}
    feeds = [{rank: model_fed(rank, number, **same) for rank in (0, 1)} for number in (0, 1)]
    (finding,) = judged(own_shift(0), own_shift(1), how="all_gather", feeds=feeds)
    assert finding.severity is Severity.WARNING
