"""What a group says of its ranks, beside the calls that they recorded."""

from distdiag.engine.collectives.calls import CollectiveStreams
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective, GroupProgress, ProcessGroup, Signature
from distdiag.events.ranks import RankSet

GROUP = ProcessGroup("0", "default_pg", (0, 1, 2, 3), "nccl")
SITE = CallSite((Frame("train.py", 7, "step"),))
SIGNATURES = {op: Signature(op, ((4,),)) for op in ("all_reduce", "broadcast")}


def stream(*ranks):
    return CollectiveStreams(RankSet(ranks)).stream(GROUP)


def call(rank, number=41, op="all_reduce"):
    return Collective(
        rank=rank,
        seq=number,
        time_ns=0,
        group=GROUP,
        collective_seq_id=number,
        signature=SIGNATURES[op],
        site=SITE,
    )


def progress(rank, completed=None, enqueued=None):
    return GroupProgress(
        rank=rank, seq=-1, time_ns=0, group=GROUP, completed=completed, enqueued=enqueued
    )


def tell(one, *events):
    """Feed events; return the points on which ranks disagree."""
    found = []
    for event in events:
        if isinstance(event, GroupProgress):
            found += one.advance(event)
        elif (alignment := one.add(event)) is not None:
            found.append(alignment)
    return found


def test_a_rank_that_came_further_is_not_missed_where_it_left_no_record():
    one = stream(0, 1, 2)
    tell(one, call(0), call(1))
    assert one.first_open().missing_ranks == RankSet([2])
    tell(one, progress(2, completed=40, enqueued=43))
    assert one.first_open() is None


def test_a_rank_that_came_less_far_is_missed():
    one = stream(0, 1, 2)
    tell(one, progress(2, completed=40, enqueued=40), call(0), call(1))
    assert one.first_open().missing_ranks == RankSet([2])


def test_records_are_compared_without_the_rank_that_left_none():
    one = stream(0, 1, 2)
    tell(one, call(0), call(1, op="broadcast"))
    (found,) = tell(one, progress(2, enqueued=41))
    assert found.expected_ranks == RankSet([0, 1])


def test_a_call_that_has_not_ended_is_waited_in_by_all_that_came():
    one = stream(0, 1)
    tell(one, progress(0, completed=40), progress(1, completed=40), call(0), call(1))
    assert [each.collective_seq_id for each in one.waiting(0)] == [41]


def test_what_was_queued_behind_a_call_that_has_not_ended_is_no_fault():
    one = stream(0, 1, 2, 3)
    tell(one, *(progress(rank, completed=40) for rank in range(4)), *map(call, range(4)))
    tell(one, call(0, 42), call(1, 42))
    assert one.first_open() is None
    assert [each.collective_seq_id for each in one.waiting(0)] == [41]


def test_a_call_that_has_ended_on_one_rank_holds_up_nobody():
    one = stream(0, 1)
    tell(one, progress(0, completed=41), progress(1, completed=40), call(0), call(1))
    tell(one, call(0, 42))
    assert one.first_open().missing_ranks == RankSet([1])


def test_members_that_left_nothing_are_missed_where_a_call_has_not_ended():
    one = stream(0, 1, 3)
    tell(one, *(progress(rank, completed=40) for rank in (0, 1, 3)), *map(call, (0, 1, 3)))
    point = one.first_open()
    assert (point.key[-1], point.missing_ranks) == (41, RankSet([2]))


def test_without_a_word_of_the_group_calls_that_all_made_have_ended():
    one = stream(0, 1, 3)
    tell(one, *map(call, (0, 1, 3)))
    assert one.first_open() is None
    assert list(one.waiting(0)) == []
