"""What the recordings of all ranks tell together: groups, where they differ, and stale dumps."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.dumps.flight_recorder import run as run_module
from distdiag.dumps.flight_recorder.reader import FlightRecorder as Reader
from distdiag.dumps.flight_recorder.run import RecordedRun
from distdiag.dumps.reading import Dump
from distdiag.events.collectives import Collective, CollectiveState
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from tests.dumps.recorders import FlightRecorder, recorders


def recording_of(recorder, *, as_json=False):
    data = recorder.json() if as_json else recorder.pickle()
    (dump,) = Reader().read(Dump(path=f"trace_{recorder.rank}", data=data))
    return dump.recording


def run_of(ranks):
    return RecordedRun({recorder.rank: recording_of(recorder) for recorder in ranks})


def seq_ids(run, rank, desc="default_pg"):
    return [
        event.collective_seq_id
        for event in run.events(rank)
        if isinstance(event, Collective) and event.group.desc == desc
    ]


def train(ranks, num_calls, **options):
    for recorder in ranks:
        for _ in range(num_calls):
            recorder.call(**options)
    return ranks


def test_the_ranks_of_a_group_come_from_the_dump():
    ranks = recorders(4)
    for recorder in ranks:
        first = recorder.rank // 2 * 2
        recorder.group("5", "tp", range(first, first + 2))
        recorder.call()
        recorder.call(group="5")
    events = [event for event in run_of(ranks).events(3) if isinstance(event, Collective)]
    assert [event.group.ranks for event in events] == [(0, 1, 2, 3), (2, 3)]


def test_gloo_writes_no_ranks_and_they_are_found_from_who_used_the_group():
    ranks = recorders(4, backend="gloo")
    for recorder in ranks:
        recorder.group("1", "edge", [])
        recorder.call()
        if recorder.rank in (0, 3):
            recorder.call(group="1")
    run = run_of(ranks)
    groups = {event.group for event in run.events(0) if isinstance(event, Collective)}
    assert {group.desc: group.ranks for group in groups} == {
        "default_pg": (0, 1, 2, 3),
        "edge": (0, 3),
    }
    assert run.members == RankSet(range(4))


def test_ranks_without_a_recording_are_members_all_the_same():
    assert run_of(recorders(4)[:2]).members == RankSet([0, 1])
    assert run_of(train(recorders(4)[:2], 1)).members == RankSet(range(4))


def test_only_what_all_recorders_still_hold_is_shown():
    ranks = recorders(3, capacity=10)
    train(ranks, 20)
    ranks[1].capacity = 4
    assert [seq_ids(run_of(ranks), rank) for rank in range(3)] == [[17, 18, 19, 20]] * 3


def test_a_rank_that_is_behind_is_not_filled_up():
    ranks = train(recorders(3), 5)
    for recorder in ranks[:2]:
        recorder.call()
        recorder.pending()
    run = run_of(ranks)
    assert seq_ids(run, 0) == [1, 2, 3, 4, 5, 6]
    assert seq_ids(run, 2) == [1, 2, 3, 4, 5]


def test_long_agreement_is_left_out(monkeypatch):
    monkeypatch.setattr(run_module, "MOST_EVENTS", 0)
    monkeypatch.setattr(run_module, "LEAST_CONTEXT", 3)
    ranks = train(recorders(2), 50)
    ranks[0].call(sizes=[(5,)])
    ranks[1].call(sizes=[(6,)])
    train(ranks, 4)
    assert seq_ids(run_of(ranks), 0) == list(range(48, 56))


def test_a_dump_that_is_older_than_the_others_accuses_nobody():
    ranks = train(recorders(3), 5)
    for recorder in ranks[:2]:
        train([recorder], 2)
        recorder.call()
        recorder.pending()
    run = run_of(ranks)
    # Calls 6 and 7 ended on the others, so rank 2 has made them since.
    assert seq_ids(run, 0) == [1, 2, 3, 4, 5, 8]
    (gap,) = [event for event in run.events(2) if isinstance(event, ProbeDisabled)]
    assert "older than those of its peers" in gap.reason
    assert not any(isinstance(event, ProbeDisabled) for event in run.events(0))


def test_a_group_that_a_ring_has_forgotten_is_not_judged():
    ranks = recorders(2, capacity=5)
    for recorder in ranks:
        recorder.group("5", "rare", [0, 1])
        recorder.call(group="5")
        train([recorder], 4)
    train(ranks[:1], 3)  # now rank 0 has forgotten its call in the other group
    assert seq_ids(run_of(ranks), 1, "rare") == []


def test_a_group_that_a_ring_would_still_hold_was_not_used():
    ranks = recorders(2, capacity=5)
    for recorder in ranks:
        recorder.group("5", "rare", [0, 1])
        train([recorder], 8)
    ranks[0].call(group="5")
    ranks[0].pending()
    assert seq_ids(run_of(ranks), 0, "rare") == [1]
    assert seq_ids(run_of(ranks), 1, "rare") == []


def test_messages_name_global_ranks():
    ranks = recorders(4)
    for recorder in ranks[2:]:
        recorder.group("5", "pp", [2, 3])
    ranks[2].message("send 0->1", group="5")
    ranks[3].message("recv 1<-0", group="5")
    signatures = [
        event.signature
        for rank in (2, 3)
        for event in run_of(ranks).events(rank)
        if isinstance(event, Collective)
    ]
    assert [(s.op, s.peer, s.tag) for s in signatures] == [("send", 3, 0), ("recv", 2, 0)]


def test_messages_that_ended_are_left_out_where_the_peer_may_have_forgotten_them():
    ranks = recorders(2, capacity=3)
    for _ in range(5):
        ranks[0].message("send 0->1")
    ranks[1].message("recv 1<-0", state="scheduled", retired=False)
    run = run_of(ranks)
    assert [list(run.events(0)), len(list(run.events(1)))] == [[], 1]


def test_the_last_call_says_whether_it_has_ended():
    done, open_ = train(recorders(2), 2)
    open_.pending()
    run = run_of([done, open_])
    ends = [[e for e in run.events(r) if isinstance(e, CollectiveState)] for r in (0, 1)]
    assert [len(found) for found in ends] == [1, 0]
    assert ends[0][0].state == "completed"


def test_a_reduce_scatter_of_gloo_is_reported_by_its_function_if_all_ranks_have_stacks():
    ranks = recorders(2, backend="gloo")
    for recorder in ranks:
        frames = recorder.call()["frames"]
        frames[0] = dict(frames[0], name="reduce_scatter_tensor")
    with_stacks = run_of(ranks)
    mixed = RecordedRun({0: recording_of(ranks[0]), 1: recording_of(ranks[1], as_json=True)})
    ops = [
        next(event for event in run.events(rank) if isinstance(event, Collective)).signature.op
        for run in (with_stacks, mixed)
        for rank in (0, 1)
    ]
    assert ops == ["reduce_scatter_tensor"] * 2 + ["all_reduce"] * 2


def test_equal_calls_are_the_same_objects_on_all_ranks():
    run = run_of(train(recorders(2), 1))
    first, second = (
        next(e for e in run.events(rank) if isinstance(e, Collective)) for rank in (0, 1)
    )
    assert first.signature is second.signature
    assert first.site is second.site


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(
    num_calls=st.lists(st.integers(0, 30), min_size=2, max_size=4),
    capacities=st.lists(st.integers(1, 30), min_size=4, max_size=4),
)
def test_what_is_shown_is_what_was_made_and_no_rank_misses_what_it_made(num_calls, capacities):
    ranks = [
        FlightRecorder(rank, len(num_calls), capacity=capacities[rank])
        for rank in range(len(num_calls))
    ]
    for recorder, number in zip(ranks, num_calls, strict=True):
        for _ in range(number):
            recorder.call(state="scheduled", retired=False)
    run = run_of(ranks)
    shown = [set(seq_ids(run, rank)) for rank in range(len(ranks))]
    for mine, number in zip(shown, num_calls, strict=True):
        assert mine <= set(range(1, number + 1))
        for theirs in shown:
            # What a peer shows and this rank made, it shows as well.
            assert {seq_id for seq_id in theirs if seq_id <= number} <= mine
