"""Which calls order accesses to files, and which do not."""

from __future__ import annotations

import pytest

from distdiag.events.lifecycle import Exited, Finished, ProbeDisabled
from tests.engine.traces import Trace


def write_then_read(between, num_ranks=2):
    """Rank 0 writes, `between` happens, rank 1 reads; return whether nothing orders them."""
    trace = Trace(num_ranks)
    trace.write(0, line=1)
    between(trace)
    trace.access(1, "read", line=2)
    return bool(trace.races)


@pytest.mark.parametrize(
    ("op", "root", "is_unordered"),
    [
        ("barrier", None, False),
        ("monitored_barrier", None, False),
        ("all_reduce", None, False),
        ("all_gather_into_tensor", None, False),
        ("reduce_scatter_tensor", None, False),
        ("all_to_all", None, False),
        ("broadcast", 0, False),
        ("broadcast", 1, True),
        ("scatter", 0, False),
        ("scatter", 1, True),
        ("reduce", 1, False),
        ("reduce", 0, True),
        ("gather", 1, False),
        ("gather_into_tensor", 0, True),
    ],
)
def test_a_collective_orders_those_who_wait_in_it(op, root, is_unordered):
    assert write_then_read(lambda t: t.everyone(op, root=root)) is is_unordered


def test_a_barrier_of_others_orders_nothing():
    assert write_then_read(lambda t: t.everyone(ranks=(0, 2)), num_ranks=3)


def test_two_barriers_of_subgroups_order_by_way_of_the_common_member():
    def between(trace):
        trace.everyone(ranks=(0, 2))
        trace.everyone(ranks=(1, 2))

    assert not write_then_read(between, num_ranks=3)


def test_a_barrier_before_the_write_orders_nothing():
    trace = Trace()
    trace.everyone()
    trace.write(0)
    trace.access(1, "read")
    (race,) = trace.races
    assert race.common_sync.signature.op == "barrier"


def test_an_empty_part_of_an_all_to_all_orders_nothing():
    def exchange(trace, rows):
        calls = [
            trace.issue(0, "all_to_all_single", output_splits=(1, 1)),
            trace.issue(1, "all_to_all_single", output_splits=(rows, 1)),
        ]
        for call in calls:
            trace.wait(call)

    assert write_then_read(lambda t: exchange(t, 0))
    assert not write_then_read(lambda t: exchange(t, 3))


@pytest.mark.parametrize("is_waited", [True, False])
def test_an_asynchronous_collective_orders_once_it_is_waited_for(is_waited):
    trace = Trace()
    trace.write(0)
    calls = [trace.issue(rank, is_async=True) for rank in (0, 1)]
    if is_waited:
        trace.wait(calls[1])
    trace.access(1, "read")
    assert bool(trace.races) is not is_waited
    assert [a.unwaited for r in trace.races for a in r.uses.values()] == [(calls[1],)] * (
        not is_waited
    )


@pytest.mark.parametrize("state", ["failed", "dropped"])
def test_a_call_that_came_to_nothing_orders_nothing(state):
    trace = Trace()
    trace.write(0)
    calls = [trace.issue(rank, is_async=True) for rank in (0, 1)]
    trace.state(calls[1], state)
    trace.access(1, "read")
    assert trace.conflicts == ["read-of-write"]


def test_what_is_seen_completed_was_waited_for():
    def between(trace):
        calls = [trace.issue(rank, is_async=True) for rank in (0, 1)]
        trace.state(calls[1], "completed")

    assert not write_then_read(between)


def test_what_cpp_issues_it_waits_for_by_itself():
    def between(trace):
        for rank in (0, 1):
            trace.issue(rank, "all_reduce", is_async=True, api=None)

    assert not write_then_read(between)


def nccl(trace, op):
    trace.everyone(op, backend="nccl")


def test_on_nccl_only_what_blocks_the_host_orders_files():
    def synced_before(trace, op):
        for rank in (0, 1):
            trace.syncs(rank)
        nccl(trace, op)

    assert write_then_read(lambda t: synced_before(t, "all_reduce"))
    assert not write_then_read(lambda t: synced_before(t, "barrier"))


def test_on_nccl_a_wait_of_the_host_for_the_device_orders():
    def between(trace):
        trace.syncs(1)
        nccl(trace, "all_reduce")
        trace.syncs(1)

    assert not write_then_read(between)


def test_on_nccl_an_earlier_wait_of_the_host_does_not_order():
    def between(trace):
        trace.syncs(1)
        trace.syncs(1)
        nccl(trace, "all_reduce")

    assert write_then_read(between)


def test_on_nccl_a_later_collective_of_the_stream_comes_after_earlier_ones():
    trace = Trace(3)
    for rank in trace.world:
        trace.syncs(rank)
    trace.write(0)
    for ranks in ((0, 1), (1, 2)):  # rank 2 hears of rank 0 by the stream of rank 1
        trace.everyone("all_reduce", ranks=ranks, backend="nccl")
    trace.syncs(2)
    trace.access(2, "read")
    assert not trace.conflicts


def test_on_nccl_the_reducer_waits_unseen():
    def between(trace):
        trace.syncs(1)
        for rank in (0, 1):
            trace.issue(rank, "all_reduce", backend="nccl", is_async=True, api=None)

    assert not write_then_read(between)


def test_on_nccl_a_rank_that_is_never_seen_to_wait_gives_no_alarm():
    assert not write_then_read(lambda t: nccl(t, "all_reduce"))


@pytest.mark.parametrize(
    ("tags", "is_unordered"),
    [((0, 0), False), ((1, 2), True)],
)
def test_a_message_orders_its_receiver_after_its_sender(tags, is_unordered):
    def between(trace):
        trace.issue(0, "send", peer=1, tag=tags[0])
        receive = trace.issue(1, "recv", peer=0, tag=tags[1], is_async=True)
        if tags[0] == tags[1]:
            trace.wait(receive)

    assert write_then_read(between) is is_unordered


def test_a_sender_is_not_ordered_after_its_receiver():
    trace = Trace()
    trace.write(1)
    trace.call(0, "send", peer=1)
    trace.call(1, "recv", peer=0)
    trace.access(0, "read")
    assert trace.conflicts == ["read-of-write"]


def test_a_receive_from_anybody_leaves_the_order_in_doubt():
    def between(trace):
        trace.call(0, "send", peer=1)
        trace.call(1, "recv_any_source")

    assert not write_then_read(between)


@pytest.mark.parametrize(("backend", "is_unordered"), [("gloo", False), ("nccl", True)])
def test_creating_a_group_orders_where_the_backend_connects_at_once(backend, is_unordered):
    def between(trace):
        for done in (False, True):
            for rank in (0, 1):
                trace.creates(rank, done=done, backend=backend)

    assert write_then_read(between) is is_unordered


# The store


def test_who_reads_a_key_comes_after_who_set_it():
    def between(trace):
        trace.store(0, "set", "ready", "1")
        trace.store(1, "get", "ready", "1", done=True)

    assert not write_then_read(between)


def test_another_key_orders_nothing():
    def between(trace):
        trace.store(0, "set", "ready", "1")
        trace.store(1, "get", "other", "1", done=True)

    assert write_then_read(between)


def test_of_several_writers_of_a_key_the_value_tells_which():
    def between(trace):
        trace.store(0, "set", "who", "zero")
        trace.store(2, "set", "who", "two")
        trace.store(1, "get", "who", "two", done=True)

    assert write_then_read(between, num_ranks=3)


@pytest.mark.parametrize(("numbers", "is_unordered"), [((1, 2), False), ((2, 1), True)])
def test_an_add_comes_after_those_that_counted_less(numbers, is_unordered):
    def between(trace):
        trace.store(0, "add", "n")
        trace.store(1, "add", "n")
        trace.store(0, "add", "n", str(numbers[0]), done=True)
        trace.store(1, "add", "n", str(numbers[1]), done=True)

    assert write_then_read(between) is is_unordered


# Files that order


def test_who_finds_a_file_comes_after_who_made_it():
    def between(trace):
        trace.access(0, "rename", "/d/done", origin="/d/.done")
        trace.access(1, "test", "/d/done", found=True)

    assert not write_then_read(between)


def test_who_found_nothing_is_not_ordered():
    def between(trace):
        trace.access(1, "test", "/d/done", found=False)
        trace.access(0, "rename", "/d/done", origin="/d/.done")

    assert write_then_read(between)


def test_who_finds_the_file_itself_may_still_read_half_of_it():
    trace = Trace()
    write = trace.access(0, "write", has_end=True)
    trace.access(1, "test", found=True)
    trace.access(1, "read")
    trace.close(write)
    assert trace.conflicts == ["read-of-write"]


def test_who_finds_a_file_gone_comes_after_who_removed_it():
    def between(trace):
        trace.access(0, "remove", "/d/busy")
        trace.access(1, "test", "/d/busy", found=False)

    assert not write_then_read(between)


def is_data_unordered(poll, num_attempts):
    """Rank 1 polls until rank 0 has put a mark beside its data, and then reads these."""
    trace = Trace()
    trace.write(0, line=1)
    for _ in range(num_attempts - 1):
        poll(trace, is_there=False)
    trace.access(0, "rename", "/d/done", origin="/d/.done")
    poll(trace, is_there=True)
    trace.access(1, "read", line=2)
    unordered = [race for race in trace.races if race.conflict == "read-of-write"]
    return "/d/f" in {path for race in unordered for path in race.paths}


def test_reading_again_what_could_not_be_read_is_a_way_of_waiting():
    def poll(trace, *, is_there):
        read = trace.access(1, "read", "/d/done", 50)
        if not is_there:
            trace.close(read, error="FileNotFoundError: /d/done")

    assert is_data_unordered(poll, 1)
    assert not is_data_unordered(poll, 2)


def test_listing_again_is_a_way_of_waiting():
    def poll(trace, *, is_there):
        trace.access(1, "list", "/d", 50)

    assert is_data_unordered(poll, 1)
    assert not is_data_unordered(poll, 2)


def test_listing_again_after_a_wait_for_others_is_none():
    def poll(trace, *, is_there):
        trace.access(1, "list", "/d", 50)
        trace.everyone("broadcast", root=1)

    assert is_data_unordered(poll, 2)


def section(trace, rank, action, line):
    trace.access(rank, "lock", "/d/lock", 60 + rank)
    trace.access(rank, action, line=line)
    trace.access(rank, "unlock", "/d/lock", 70 + rank)


def test_sections_of_a_lock_are_ordered_as_they_came():
    trace = Trace()
    section(trace, 0, "write", 1)
    section(trace, 1, "read", 2)
    trace.access(1, "read", line=3)
    assert trace.races == []


def test_a_section_that_waits_for_the_lock_comes_after_the_one_that_holds_it():
    trace = Trace()
    trace.access(0, "lock", "/d/lock")
    trace.access(1, "lock", "/d/lock")
    trace.write(0)
    trace.access(0, "unlock", "/d/lock")
    trace.access(1, "read")
    trace.access(1, "unlock", "/d/lock")
    assert trace.races == []


def test_what_follows_the_later_section_is_not_ordered_with_the_earlier_rank():
    trace = Trace()
    section(trace, 0, "read", 1)
    trace.write(0, line=2)
    section(trace, 1, "read", 3)
    assert trace.conflicts == ["read-of-write"]


def test_different_locks_exclude_nothing():
    trace = Trace()
    for rank, action in ((0, "write"), (1, "read")):
        trace.access(rank, "lock", f"/d/lock{rank}")
        trace.access(rank, action)
        trace.access(rank, "unlock", f"/d/lock{rank}")
    assert trace.conflicts == ["read-of-write"]


def test_a_file_that_only_one_can_create_is_a_lock():
    trace = Trace()
    trace.access(0, "write", "/d/lock", is_exclusive=True)
    trace.access(1, "write", "/d/lock", 50, is_exclusive=True)  # fails
    trace.write(0)
    trace.access(0, "remove", "/d/lock")
    trace.access(1, "write", "/d/lock", 50, is_exclusive=True)
    trace.access(1, "read")
    trace.access(1, "remove", "/d/lock")
    assert trace.races == []


# Doubt


def test_a_wait_that_never_ends_does_not_hide_what_came_before():
    trace = Trace()
    trace.write(0)
    trace.access(1, "read")
    trace.issue(1)
    assert trace.conflicts == ["read-of-write"]


def test_a_wait_whose_partner_left_is_over_and_what_follows_is_in_doubt():
    trace = Trace(3)
    trace.write(0)
    trace.add(Exited, 2)
    call = trace.issue(1)
    trace.wait(call)
    trace.access(1, "read")
    assert trace.races == []


@pytest.mark.parametrize("probe", ["collectives", "work", "files"])
def test_a_rank_that_is_not_observed_wholly_gives_no_alarm(probe):
    trace = Trace()
    trace.add(ProbeDisabled, 1, probe=probe, reason="it failed")
    trace.write(0)
    trace.access(1, "read")
    assert trace.races == []


def test_files_that_are_not_observed_on_one_rank_leave_the_others():
    trace = Trace(3)
    trace.add(ProbeDisabled, 2, probe="files", reason="it failed")
    trace.write(0)
    trace.access(1, "read")
    assert trace.conflicts == ["read-of-write"]


def test_a_probe_that_says_nothing_of_order_changes_nothing():
    trace = Trace()
    trace.add(ProbeDisabled, 1, probe="steps", reason="it failed")
    trace.write(0)
    trace.access(1, "read")
    assert trace.conflicts == ["read-of-write"]


def test_a_call_of_a_group_with_members_that_are_not_observed_leaves_doubt():
    trace = Trace()
    trace.write(0)
    trace.issue(0, ranks=(0, 7))
    trace.access(1, "read")
    assert trace.races == []


def test_too_many_events_that_wait_end_the_replay_and_say_so(monkeypatch):
    monkeypatch.setattr("distdiag.engine.files.order.MOST_QUEUED", 20)
    trace = Trace(3)
    for _ in range(30):
        trace.call(0)
    trace.write(0)
    trace.access(1, "read")
    races = trace.judged()
    assert "ranks 1-2" in races.problem
    assert list(races.changed()) == []


def test_a_rank_that_finished_is_not_waited_for_by_the_clock():
    trace = Trace()
    trace.write(0)
    trace.access(1, "test", "/d/x", found=True)
    trace.access(1, "read")
    trace.access(1, "read", "/d/y")
    trace.add(Finished, 0, exit_status=0)
    races = trace.judged()
    assert [race.conflict.value for _, race in races.changed()] == ["read-of-write"]
