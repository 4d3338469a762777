"""Calls of ranks whose records were lost in the middle are unknown, and never missing."""

from distdiag.engine.collectives.calls import CollectiveStreams, GroupCalls, Messages
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective, GroupCreated, ProcessGroup, Signature
from distdiag.events.ranks import RankSet

GROUP = ProcessGroup("0", "default_pg", (0, 1), "gloo")
SITE = CallSite((Frame("train.py", 1, "main"),))
SUM = Signature("all_reduce", ((4,),))


def call(rank, number, signature=SUM):
    return Collective(
        rank=rank,
        seq=number,
        time_ns=number,
        group=GROUP,
        collective_seq_id=number,
        signature=signature,
        site=SITE,
    )


def test_what_a_rank_called_in_the_gap_is_not_missing_and_what_comes_later_is():
    streams = CollectiveStreams(RankSet((0, 1)))
    stream = streams.stream(GROUP)
    for number in range(4):
        stream.add(call(0, number))
    streams.lose(1)
    assert stream.first_open() is None
    stream.add(call(0, 4))
    assert stream.first_open() is None
    stream.add(call(1, 6))
    stream.add(call(0, 5))
    stream.add(call(0, 6))
    assert stream.first_open() is None
    stream.add(call(0, 7))
    alignment = stream.first_open()
    assert alignment.key[1] == 7
    assert alignment.missing_ranks == RankSet((1,))


def test_calls_that_differ_after_the_gap_are_found():
    streams = CollectiveStreams(RankSet((0, 1)))
    stream = streams.stream(GROUP)
    streams.lose(0)
    stream.add(call(0, 9))
    assert stream.add(call(1, 9, Signature("broadcast", ((4,),)))) is not None


def test_a_group_that_a_rank_never_calls_again_waits_for_nobody():
    streams = CollectiveStreams(RankSet((0, 1)))
    streams.lose(1)
    stream = streams.stream(GROUP)
    for number in range(3):
        stream.add(call(0, number))
    assert stream.first_open() is None
    assert not list(stream.waiting(0))


def test_messages_and_groups_are_counted_and_so_not_paired_after_a_gap():
    messages, groups = Messages(RankSet((0, 1))), GroupCalls(RankSet((0, 1)))
    for calls in (messages, groups):
        calls.leave_out(1)
    receive = Signature("recv", ((4,),), peer=0)
    assert messages.add(call(1, -1, receive)) is None
    assert messages.add(call(0, -1, Signature("send", ((5,),), peer=1))) is None
    assert not list(messages.unmatched())
    for rank, ranks in ((0, (0,)), (1, (1,))):
        made = GroupCreated(
            rank=rank, seq=1, time_ns=1, api="new_group", ordinal=0, scope=(0, 1), ranks=ranks,
            desc="", generation=0, site=SITE,
        )  # fmt: skip
        assert groups.add(made) is None


def test_calls_that_came_before_the_loss_of_another_rank_was_read_stay():
    streams = CollectiveStreams(RankSet((0, 1)))
    stream = streams.stream(GROUP)
    streams.lose(0)
    for number in (5, 6, 7):
        stream.add(call(0, number))
    streams.lose(1)
    assert stream.first_open() is None
    for number in (5, 6):
        stream.add(call(1, number))
    assert stream.first_open().key[1] == 7
    assert stream.first_open().missing_ranks == RankSet((1,))
