"""Losses are shown with divisors that gradients tell, where no wrapper does."""

import msgspec
import pytest

from distdiag.engine.losses.combined import CombinedLossAligner
from distdiag.events.ranks import RankSet
from tests.checks.gradients import DENSE, gradient, sample
from tests.checks.losses import mean, reported
from tests.checks.sequences import both
from tests.engine.aligned import aligned

STEPS = range(3)


def sums(rank, step, combined=(0, 1), divisor=1.0):
    """Gradients of a rank that are those of these ranks, added up and divided."""
    event = sample(step, 1.0, 1.0).by_rank[rank]
    gradients = tuple(gradient(name, rank, step, combined, divisor) for name in DENSE)
    return msgspec.structs.replace(event, gradients=gradients)


def losses(rank, step, **values):
    return reported(rank, [mean(3)], step, **{"members": (), "divisor": 0.0, **values})


def shown(*events, ends=True):
    return aligned(CombinedLossAligner, *events, ends=ends).views


def all_of(step, **values):
    return [f(rank, step, **values) for rank in (0, 1) for f in (losses, sums)]


@pytest.mark.parametrize(("combined", "divisor"), [((0, 1), 1.0), ((0, 1), 2.0), ((0, 1), 3.7)])
def test_the_divisor_is_that_of_the_gradients(combined, divisor):
    events = [f(r, n) for n in STEPS for r in (0, 1) for f in (losses,)]
    events += [sums(r, n, combined, divisor) for n in STEPS for r in (0, 1)]
    views = shown(*events)
    assert views[-1].is_measured
    assert views[-1].ranks == RankSet(combined)
    assert [each.step for each in views[-1].windows] == [*STEPS]
    assert [each.divisor for each in views[-1].windows] == pytest.approx([divisor] * 3)


def test_ranks_that_combine_nothing_are_shown_apart():
    views = shown(*[e for r in (0, 1) for e in (losses(r, 0), sums(r, 0, (r,)))])
    assert {tuple(view.ranks) for view in views} == {(0,), (1,)}


def test_copies_are_no_other_data():
    events = [losses(rank, 0) for rank in (0, 1)]
    events += [
        msgspec.structs.replace(sums(0, 0, (0,)), rank=rank) for rank in (0, 1)
    ]  # both have given and apply the same
    views = shown(*events)
    assert {tuple(view.ranks) for view in views} == {(0,), (1,)}
    assert views[-1].windows[0].divisor == 1.0


def test_a_step_is_shown_when_all_have_reported_the_next_one():
    first, second = all_of(0), all_of(1)
    assert not shown(*first, ends=False)
    assert len(shown(*first, *second, ends=False)) == 1
    assert [len(view.windows) for view in shown(*first, *second)] == [1, 2, 2]


def test_who_shares_sequences_is_reported():
    views = shown(*all_of(0), *both(0))
    ((sequences,),) = [view.sequences for view in views[-1:]]
    assert sequences.ranks == RankSet([0, 1])


UNCLEAR = {
    "a wrapper tells": [losses(r, 0, members=(0, 1), divisor=2.0) for r in (0, 1)],
    "a wrapper on one rank": [losses(0, 0, divisor=2.0), losses(1, 0)],
    "two optimizers": [losses(r, 0, optimizer=name) for r in (0, 1) for name in ("SGD", "AdamW")],
    "unlike optimizers": [losses(r, 0, optimizer=("SGD", "AdamW")[r]) for r in (0, 1)],
    "one rank": [losses(0, 0)],
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_not_clear_is_not_shown(name):
    assert not shown(*UNCLEAR[name], sums(0, 0), sums(1, 0))


def test_what_a_wrapper_tells_is_shown_where_ranks_share_sequences():
    wrapped = [losses(r, 0, members=(0, 1), divisor=2.0) for r in (0, 1)]
    views = shown(*wrapped, sums(0, 0), sums(1, 0), *both(0))
    assert not any(each.is_measured for each in views)
    assert views[0].windows[0].divisor == 2.0


def test_gradients_of_two_models_are_not_shown():
    other = [msgspec.structs.replace(sums(r, 0), model="Other") for r in (0, 1)]
    assert not shown(*all_of(0), *other)


def test_gradients_that_were_combined_in_unlike_ways_are_not_shown():
    ways = [(0, 1), (0,), (0, 1), (0,)]
    mixed = [
        msgspec.structs.replace(
            sums(r, 0),
            gradients=tuple(
                gradient(name, r, 0, way if len(way) > 1 else (r,), 1.0)
                for name, way in zip(DENSE, ways, strict=True)
            ),
        )
        for r in (0, 1)
    ]
    assert not shown(losses(0, 0), losses(1, 0), *mixed)
