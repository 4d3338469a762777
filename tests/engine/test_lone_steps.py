from itertools import count

import pytest

from distdiag.checks.env.unconnected_ranks import UnconnectedRanks
from distdiag.engine.data import LoneSteps
from distdiag.engine.runner import Judges
from distdiag.events.collectives import Collective, GroupCreated, ProcessGroup
from distdiag.events.lifecycle import ProbeDisabled, SteppedAlone
from distdiag.events.ranks import RankSet
from tests.checks.streams import plain_site, signature

WORLD = RankSet([0, 1, 2])
_SEQS = count()


def alone(rank, **values):
    fields = {"num_launched": 3, "library": "", "others": (), "site": plain_site(14 + rank)}
    return SteppedAlone(rank=rank, seq=next(_SEQS), time_ns=0, **{**fields, **values})


def joins(rank):
    """A rank creates the default group."""
    return GroupCreated(
        rank=rank,
        seq=next(_SEQS),
        time_ns=0,
        api="init_process_group",
        ordinal=0,
        scope=tuple(WORLD),
        ranks=tuple(WORLD),
        desc="default_pg",
        generation=0,
        site=plain_site(3),
    )


def calls(rank):
    """A rank issues a collective."""
    group = ProcessGroup("0", "default_pg", tuple(WORLD), "gloo")
    return Collective(
        rank=rank,
        seq=next(_SEQS),
        time_ns=0,
        group=group,
        collective_seq_id=0,
        signature=signature(),
        site=plain_site(5),
    )


def watched(*events, is_over=True):
    judges = Judges([UnconnectedRanks()])
    watch = LoneSteps(WORLD, judges)
    for event in events:
        watch.feed(event)
    if is_over:
        watch.finish()
    assert not judges.disabled
    return judges.conclusions.all(), watch.not_checked


@pytest.mark.parametrize("is_over", [False, True])
def test_ranks_that_all_step_without_a_group_are_told_at_once(is_over):
    (finding,), not_checked = watched(*map(alone, WORLD), is_over=is_over)
    assert finding.ranks == WORLD
    assert not not_checked


def test_a_group_that_was_made_before_connects_nobody():
    (finding,), _ = watched(*map(joins, WORLD), *map(alone, WORLD))
    assert finding.ranks == WORLD


def test_where_one_rank_never_steps_the_others_are_named_at_the_end():
    assert watched(alone(0), alone(2), is_over=False)[0] == ()
    (finding,), _ = watched(alone(0), alone(2))
    assert finding.ranks == RankSet([0, 2])
    assert "ranks 0,2 train alone" in finding.message


@pytest.mark.parametrize("connect", [joins, calls])
def test_ranks_that_meet_later_are_taken_back(connect):
    assert watched(*map(alone, WORLD), *map(connect, WORLD))[0] == ()


def test_collectives_before_the_first_step_connect_whatever_the_library_says():
    stepped = [alone(rank, library="accelerate") for rank in WORLD]
    assert watched(*map(calls, WORLD), *stepped)[0] == ()


def test_steps_that_are_not_observed_are_told():
    broken = ProbeDisabled(rank=1, seq=0, time_ns=0, probe="steps", reason="why", traceback="")
    assert watched(broken)[1] == {"ENV001": "the steps of rank 1 are not observed"}
