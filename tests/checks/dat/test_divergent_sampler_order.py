from dataclasses import replace

import pytest

from distdiag.checks.dat.divergent_sampler_order import DivergentSamplerOrder
from distdiag.events.data import MOST_LEAST
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.alignment import OwnListView
from tests.checks.feeds import epoch_fed
from tests.checks.streams import together
from tests.checks.verdicts import findings

EVEN, ODD, FIRST = list(range(0, 32, 2)), list(range(1, 32, 2)), list(range(16))
ROWS = [f"row {number}" for number in range(16)]


def judged(*events):
    return findings(DivergentSamplerOrder, together(*events))


def test_parts_that_overlap_are_named_with_their_counts():
    (finding,) = judged(epoch_fed(0, EVEN), epoch_fed(1, FIRST, seed=1))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert finding.ranks == RankSet([0, 1])
    assert "8 samples are read by several ranks, and 8 of 32 by none" in finding.message
    assert [each.values["seed"] for each in finding.evidence] == [0, 1]


def test_samples_that_are_alike_under_other_indices_are_named():
    events = [epoch_fed(0, EVEN, contents=tuple(ROWS)), epoch_fed(1, ODD, contents=tuple(ROWS[4:]))]
    (finding,) = judged(*events)
    assert "12 samples are the same on several ranks" in finding.message
    assert "the order of the data set is not the same" in finding.message


def test_ranks_of_which_nobody_knows_that_they_train_together_get_a_note():
    events = [epoch_fed(0, EVEN, members=()), epoch_fed(1, FIRST, members=())]
    (finding,) = judged(*events)
    assert finding.severity is Severity.INFO


def test_those_that_the_program_reduces_gradients_over_train_together():
    events = [epoch_fed(0, EVEN, members=()), epoch_fed(1, FIRST, members=())]
    view = replace(together(*events), are_reduced=True)
    (finding,) = findings(DivergentSamplerOrder, view)
    assert finding.severity is Severity.WARNING


def test_of_too_many_samples_the_seeds_are_compared():
    events = [epoch_fed(rank, EVEN, indices=b"", is_ascending=False, seed=rank) for rank in (0, 1)]
    (finding,) = judged(*events)
    assert "parts are cut out of orders with different seeds" in finding.message


def test_padding_is_read_twice_and_silent():
    odd = [*ODD[:-1], 0]
    events = [epoch_fed(0, EVEN, num_samples=31), epoch_fed(1, odd, num_samples=31)]
    assert not judged(*events)


def test_ranks_of_one_part_read_the_same():
    assert not judged(
        epoch_fed(0, EVEN, num_ranks=4, num_replicas=2, replica=0),
        epoch_fed(1, EVEN, num_ranks=4, num_replicas=2, replica=0),
        epoch_fed(2, ODD, num_ranks=4, num_replicas=2, replica=1),
        epoch_fed(3, ODD, num_ranks=4, num_replicas=2, replica=1),
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({}, {"num_samples": 40}),
        ({"num_replicas": None}, {"num_replicas": None}),
        ({"num_replicas": 1}, {"num_replicas": 1}),
        ({"replica": 0}, {"replica": 0}),
        ({"epoch": 0}, {"epoch": 1}),
        ({"num_backwards": 0}, {}),
        ({"num_indices": 20}, {}),
        ({"indices": b""}, {}),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_silent(left, right):
    assert not judged(epoch_fed(0, EVEN, **left), epoch_fed(1, FIRST, **right))


def test_a_data_set_with_samples_that_are_alike_is_silent():
    rows = ("same", *ROWS)
    events = [epoch_fed(0, EVEN, contents=("same", *rows)), epoch_fed(1, ODD, contents=rows)]
    assert not judged(*events)


# Lists that each rank makes for itself, by the least digests of all their samples


def in_lists(*lists, **values):
    by_rank = {}
    for rank, samples in enumerate(lists):
        least = tuple(f"{sample:04}" for sample in sorted(samples))
        order, number = range(len(least)), len(least)
        chain = ("BatchSampler", "RandomSampler")
        own = {"num_replicas": None, "replica": None, "chain": chain, "num_samples": number}
        by_rank[rank] = epoch_fed(rank, order, least=least, number=0, **own, **values)
    shown = OwnListView("data", ("x",), by_rank, RankSet(by_rank))
    return findings(DivergentSamplerOrder, shown)


def test_lists_that_were_cut_out_of_different_orders_are_named():
    (finding,) = in_lists(range(96), [*range(48), *range(100, 148)])
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "about 25% of the samples that ranks read in pass 1" in finding.message
    assert finding.ranks == RankSet([0, 1])


def test_what_is_beyond_the_end_of_a_list_that_was_cut_may_be_in_it():
    low = range(MOST_LEAST)  # of more that it has
    (finding,) = in_lists(low, [*range(MOST_LEAST // 2), *range(2000, 2000 + MOST_LEAST // 2)])
    assert "about 33% of" in finding.message


@pytest.mark.parametrize(
    "lists",
    [
        (range(96), range(96, 192)),
        (range(96), range(96)),
        (range(96), range(1, 97)),
        (range(96), [*range(4), *range(100, 192)]),
        (range(96), range(96), range(96, 192), range(96, 192)),
    ],
    ids=["parts", "the same", "all but few", "few alike", "two of each part"],
)
def test_lists_that_may_be_meant_are_silent(lists):
    assert not in_lists(*lists)


@pytest.mark.parametrize(
    "values", [{"is_complete": False}, {"num_backwards": 0}, {"num_indices": 48}], ids=str
)
def test_passes_that_broke_off_or_do_not_train_or_choose_are_silent(values):
    assert not in_lists(range(96), [*range(48), *range(100, 148)], **values)
