"""Which ranks nothing connects."""

from __future__ import annotations

import pytest

from distdiag.engine.aligner import NotObserved
from distdiag.engine.data import LoneStepsAligner
from distdiag.events.collectives import GroupCreated
from distdiag.events.lifecycle import SteppedAlone
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import LoneStepsView
from tests.checks.streams import Job, event_of, plain_site
from tests.engine.aligned import aligned, broken

# Ranks that take their first step alone

WORLD = RankSet([0, 1, 2])


def alone(rank):
    fields = {"num_launched": 3, "library": "", "others": ()}
    return event_of(SteppedAlone, rank, site=plain_site(14), **fields)


def joins(rank):
    """A rank creates the default group."""
    fields = {"api": "init_process_group", "ordinal": 0, "desc": "default_pg", "generation": 0}
    fields |= {"scope": tuple(WORLD), "ranks": tuple(WORLD)}
    return event_of(GroupCreated, rank, site=plain_site(3), **fields)


def calls(rank):
    return Job(3).call(rank)


def shown(*events, ends=True):
    """The ranks of each view, in the order in which they are shown; the last one stands."""
    views, gaps, _ = aligned(LoneStepsAligner, *events, world=WORLD, ends=ends)
    assert len({view.supersedes for view in views}) <= 1
    assert not gaps
    return [view.present_ranks for view in views]


def test_ranks_that_all_step_without_a_group_are_shown_at_once():
    assert shown(*map(alone, WORLD), ends=False) == [WORLD]


def test_where_one_rank_never_steps_the_others_are_shown_at_the_end():
    assert shown(alone(0), alone(2), ends=False) == []
    assert shown(alone(0), alone(2)) == [RankSet([0, 2])]


def test_a_group_that_was_made_before_connects_nobody():
    assert shown(*map(joins, WORLD), *map(alone, WORLD))[-1] == WORLD


@pytest.mark.parametrize("connect", [joins, calls])
def test_ranks_that_meet_later_are_taken_back(connect):
    assert shown(*map(alone, WORLD), *map(connect, WORLD))[-1] == RankSet()


def test_collectives_before_the_first_step_connect():
    assert shown(*map(calls, WORLD), *map(alone, WORLD))[-1] == RankSet()


def test_steps_that_are_not_observed_are_reported():
    gap = NotObserved("the steps of rank 1 are not observed")
    assert aligned(LoneStepsAligner, broken(1, "steps")).gaps == {LoneStepsView: gap}
