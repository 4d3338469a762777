"""Entries of a recorder become rows: batches are one call, rings begin somewhere, groups end."""

import msgspec

from distdiag.dumps.flight_recorder.reader import FlightRecorder as Reader
from distdiag.dumps.flight_recorder.recording import COMPLETED, PENDING, RETIRED, Tables
from distdiag.dumps.reading import Dump
from tests.dumps.recorders import FlightRecorder


def recording_of(recorder):
    (dump,) = Reader().read(Dump(path="trace_0", data=recorder.pickle()))
    return dump.recording


def calls_of(recorder):
    """Return (op, input sizes, seq_id, state) of each call."""
    recording = recording_of(recorder)
    tables = msgspec.msgpack.decode(recording.tables, type=Tables)
    rows = [(tables.calls[row[1]].signature, row) for row in recording.columns.rows()]
    return [(s.op, s.input_sizes, row[2], row[3]) for s, row in rows]


def test_calls_that_were_issued_as_one_are_one():
    recorder = FlightRecorder(0, 2)
    recorder.call("_all_gather_base", [(4,)], [(8,)], state="scheduled", retired=False)
    recorder.same_call("_all_gather_base", [(6,)], [(12,)], state="scheduled", retired=False)
    recorder.same_call("coalesced")
    recorder.call().pop("frames")
    assert calls_of(recorder) == [
        ("all_gather_into_tensor_coalesced", ((4,), (6,)), 1, COMPLETED),
        ("all_reduce", ((4,),), 2, COMPLETED),
    ]


def test_a_batch_of_unlike_calls_has_no_sizes_that_could_be_compared():
    recorder = FlightRecorder(0, 2)
    recorder.call("_broadcast_oop", [(4,)])
    recorder.same_call("_broadcast_oop", [(5,)])
    recorder.same_call("all_gather")
    assert [op for op, *_ in calls_of(recorder)] == ["coalesced"]


def test_a_batch_of_messages_ends_by_its_last_entry():
    recorder = FlightRecorder(0, 2)
    recorder.call()
    recorder.message("send 0->1", state="scheduled", retired=False)
    recorder.message("recv 0<-1", batch=True, state="scheduled", retired=False)
    recorder.same_call("coalesced")
    recorder.message("send 0->1", state="scheduled", retired=False)
    assert calls_of(recorder) == [
        ("all_reduce", ((4,),), 1, COMPLETED),
        ("send", ((4,),), -1, COMPLETED),
        ("recv", ((4,),), -1, COMPLETED),
        ("send", ((4,),), -1, PENDING),
    ]


def test_a_ring_tells_where_it_begins():
    recorder = FlightRecorder(0, 2, capacity=3)
    for line in range(8):
        recorder.call(line=line)
    recording = recording_of(recorder)
    assert (recording.first_id, recording.windows[0].first, recording.windows[0].last) == (5, 6, 8)


def test_a_batch_whose_begin_was_forgotten_is_left_out():
    recorder = FlightRecorder(0, 2, capacity=3)
    recorder.call("_all_gather_base", [(4,)], [(8,)])
    recorder.same_call("_all_gather_base", [(6,)], [(12,)])
    recorder.same_call("coalesced")
    recorder.call()
    assert [op for op, *_ in calls_of(recorder)] == ["all_reduce"]


def test_only_the_newest_instance_of_a_group_is_kept():
    recorder = FlightRecorder(0, 2)
    recorder.call(sizes=[(1,)], pg_id=3)
    recorder.call(sizes=[(2,)], pg_id=9, collective_seq_id=1)
    assert calls_of(recorder) == [("all_reduce", ((2,),), 1, COMPLETED)]


def test_two_backends_of_one_group_count_by_themselves():
    recorder = FlightRecorder(0, 2)
    recorder.call(collective_seq_id=1)
    recorder.call(collective_seq_id=1, profiling_name="gloo:barrier")
    assert [group.backend for group in recording_of(recorder).groups] == ["nccl", "gloo"]


def test_what_a_rank_saw_end_proves_that_all_came():
    recorder = FlightRecorder(0, 2)
    recorder.call()
    recorder.call("broadcast")
    recorder.call()
    recorder.pending()
    # The root of a broadcast may be done before anybody else has come.
    assert recording_of(recorder).windows[0].proven == 1


def test_a_call_that_timed_out_has_not_ended():
    recorder = FlightRecorder(0, 2)
    recorder.call()
    recorder.call(state="started", retired=True, timeout_ms=120_000)
    assert [state for *_, state in calls_of(recorder)] == [COMPLETED, RETIRED]
    recording = recording_of(recorder)
    assert (recording.timed_out_s, recording.windows[0].proven) == (120.0, 1)


def test_gloo_lets_go_of_a_call_that_failed_too():
    recorder = FlightRecorder(0, 2, backend="gloo")
    recorder.call()
    recorder.call()
    recording = recording_of(recorder)
    assert (recording.windows[0].proven, recording.timed_out_s) == (1, 0)


def test_equal_calls_have_equal_digests_whatever_came_before():
    long, short = FlightRecorder(0, 2), FlightRecorder(1, 2)
    long.call("broadcast", line=99)
    for recorder in (long, short):
        for line in (10, 20, 10):
            recorder.call(line=line)
    first, second = recording_of(long).windows[0], recording_of(short).windows[0]
    assert first.digests_of(2, 4) == second.digests_of(1, 3)
    assert first.digests_of(2, 2) == first.digests_of(4, 4) != first.digests_of(3, 3)
