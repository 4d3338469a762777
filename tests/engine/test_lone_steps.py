"""Ranks that take their first step alone are shown at once, and no longer once they meet."""

import pytest

from distdiag.engine.aligner import CallOrder, Job, NotObserved
from distdiag.engine.data import LoneStepsAligner
from distdiag.events.collectives import Collective, GroupCreated, ProcessGroup
from distdiag.events.lifecycle import ProbeDisabled, SteppedAlone
from distdiag.events.ranks import RankSet
from distdiag.findings.store import FindingStore
from distdiag.views.alignment import LoneStepsView
from tests.checks.streams import event_of, plain_site, signature

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
    """A rank issues a collective."""
    group = ProcessGroup("0", "default_pg", tuple(WORLD), "gloo")
    fields = {"group": group, "collective_seq_id": 0, "signature": signature()}
    return event_of(Collective, rank, site=plain_site(5), **fields)


def shown(*events, is_over=True):
    """The ranks of each view, in the order in which they are shown; the last one stands."""
    aligner = LoneStepsAligner(Job(WORLD, dict, {}, FindingStore({}), CallOrder()))
    views = [view for event in events for view in aligner.feed(event)]
    views += aligner.end() if is_over else ()
    assert len({view.supersedes for view in views}) <= 1
    assert not aligner.gaps()
    return [view.present_ranks for view in views]


def test_ranks_that_all_step_without_a_group_are_shown_at_once():
    assert shown(*map(alone, WORLD), is_over=False) == [WORLD]


def test_where_one_rank_never_steps_the_others_are_shown_at_the_end():
    assert shown(alone(0), alone(2), is_over=False) == []
    assert shown(alone(0), alone(2)) == [RankSet([0, 2])]


def test_a_group_that_was_made_before_connects_nobody():
    assert shown(*map(joins, WORLD), *map(alone, WORLD))[-1] == WORLD


@pytest.mark.parametrize("connect", [joins, calls])
def test_ranks_that_meet_later_are_taken_back(connect):
    assert shown(*map(alone, WORLD), *map(connect, WORLD))[-1] == RankSet()


def test_collectives_before_the_first_step_connect():
    assert shown(*map(calls, WORLD), *map(alone, WORLD))[-1] == RankSet()


def test_steps_that_are_not_observed_are_told():
    aligner = LoneStepsAligner(Job(WORLD, dict, {}, FindingStore({}), CallOrder()))
    fields = {"probe": "steps", "reason": "why", "traceback": ""}
    assert not list(aligner.feed(event_of(ProbeDisabled, 1, **fields)))
    gap = NotObserved("the steps of rank 1 are not observed")
    assert aligner.gaps() == {LoneStepsView: gap}
