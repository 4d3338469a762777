"""What messages of process groups tell together, as events."""

import pytest

from distdiag.dumps.logs.group_reports import (
    GroupName,
    GroupReport,
    ReportDump,
    ReportedRun,
    op_of,
    sizes_of,
)
from distdiag.events.collectives import UNNUMBERED, Collective, GroupProgress

DEFAULT = GroupName("0", "default_pg")
DP = GroupName("7", "dp")


def said(rank, *reports, num_ranks=0):
    return ReportDump(
        rank=rank,
        events=(),
        path="train.log",
        source="nccl-log",
        reports=reports,
        num_ranks=num_ranks,
    )


def call(group=DEFAULT, place=0, op="all_reduce", seq=41, **values):
    return GroupReport(group=group, own_place=place, op=op, seq=seq, **values)


def count(group=DEFAULT, place=0, enqueued=40, completed=40):
    return GroupReport(group=group, own_place=place, enqueued=enqueued, completed=completed)


def calls_of(run, rank):
    return [event for event in run.events(rank) if isinstance(event, Collective)]


def progress_of(run, rank):
    return [
        (event.completed, event.enqueued)
        for event in run.events(rank)
        if isinstance(event, GroupProgress)
    ]


@pytest.mark.parametrize(
    ("op", "numels", "sizes"),
    [
        ("all_reduce", (64, 64), (((64,),), ((64,),))),
        ("all_gather", (64, 256), (((64,),), ((64,),) * 4)),
        ("reduce_scatter", (256, 64), (((64,),) * 4, ((64,),))),
        ("all_gather", (64, 250), ((), ())),
        ("all_to_all_single", (64, 60), ((), ())),
    ],
)
def test_sizes_are_reported_only_where_they_can_be_compared(op, numels, sizes):
    assert sizes_of(op, *numels) == sizes


def test_operations_have_the_names_of_live_calls():
    assert [op_of(name) for name in ("ALLREDUCE", "_ALLGATHER_BASE", "ALLTOALL_BASE", "NEW")] == [
        "all_reduce",
        "all_gather_into_tensor",
        "all_to_all_single",
        "new",
    ]


def test_a_call_that_timed_out_has_not_ended_and_what_came_before_has():
    run = ReportedRun([said(1, call(place=1), count(place=1, enqueued=43))])
    assert progress_of(run, 1) == [(40, None), (40, 43)]
    (found,) = calls_of(run, 1)
    assert (found.collective_seq_id, found.group.name, found.group.label) == (41, "0", "default_pg")


def test_counters_that_contradict_the_call_tell_nothing():
    run = ReportedRun([said(1, call(place=1, seq=64), count(place=1, enqueued=90, completed=70))])
    assert progress_of(run, 1) == [(63, None), (63, 64)]


def test_a_call_without_a_number_comes_last():
    run = ReportedRun([said(0, call(seq=None))])
    assert [event.collective_seq_id for event in calls_of(run, 0)] == [UNNUMBERED]
    assert progress_of(run, 0) == [(UNNUMBERED - 1, None)]


def test_the_default_group_has_all_ranks_that_wrote_to_the_log():
    run = ReportedRun([said(0, call(), num_ranks=6)])
    assert str(run.members) == "0-5"
    assert calls_of(run, 0)[0].group.ranks == tuple(range(6))


def test_numbers_of_processes_without_a_rank_are_no_ranks():
    run = ReportedRun([said(0, call()), said(1, call(DP, 0))], [0, 1], [1])
    assert str(run.members) == "0-1"
    assert calls_of(run, 0)[0].group.ranks == (0,)


def test_a_group_has_the_ranks_that_spoke_of_it_in_the_order_of_their_places():
    run = ReportedRun([said(5, call(DP, 1)), said(2, call(DP, 0))])
    assert calls_of(run, 5)[0].group.ranks == (2, 5)


def test_two_ranks_at_one_place_are_of_two_groups_that_nothing_tells_apart():
    run = ReportedRun([said(5, call(DP, 1)), said(2, call(DP, 1))])
    assert not run.ranks
    assert list(run.events(5)) == []


def test_an_unnamed_group_in_which_a_rank_has_another_place_is_not_the_default_one():
    run = ReportedRun([said(3, call(GroupName(), 1)), said(0, call(GroupName(), 0))])
    assert not run.ranks


def test_what_a_rank_says_of_its_peers_is_theirs():
    report = GroupReport(group=DP, own_place=0, place=1, enqueued=8, completed=8)
    run = ReportedRun([said(4, call(DP, 0, seq=9), report), said(6, count(DP, 1, 8, 8))])
    assert progress_of(run, 6) == [(8, None), (8, 8)]
    run = ReportedRun([said(4, call(DP, 0, seq=9), report)])
    assert str(run.ranks) == "4"  # who is at place 1 is not known


def test_who_met_in_a_call_has_come_to_it():
    other = GroupReport(group=DEFAULT, own_place=0, place=1, op="broadcast", seq=41, is_whole=True)
    run = ReportedRun([said(0, call(is_whole=True), other), said(2, count(place=2))])
    assert progress_of(run, 2)[-1] == (40, 41)


def test_messages_to_a_peer_are_no_collectives():
    run = ReportedRun([said(0, call(op="send"), count(enqueued=50))])
    assert list(run.events(0)) == []
    assert not run.ranks


def test_the_longest_wait_is_known():
    run = ReportedRun([said(0, call(ran_s=600.01)), said(1, call(place=1, ran_s=598.0))])
    assert run.lasted_s == 600.01
