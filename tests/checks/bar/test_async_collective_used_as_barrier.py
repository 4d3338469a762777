from msgspec.structs import replace

from distdiag.checks.bar.async_collective_used_as_barrier import AsyncCollectiveUsedAsBarrier
from distdiag.checks.bar.unordered_file_access import UnorderedFileAccess
from distdiag.events.collectives import ProcessGroup
from distdiag.events.ranks import RankSet
from tests.checks.races import access, alarms, barrier, race
from tests.checks.streams import plain_site


def behind(call):
    return race(
        "read-of-write",
        [access(0, "write", plain_site(3))],
        [access(1, "read", plain_site(9), unwaited=[call])],
    )


def test_a_barrier_that_was_not_waited_for_is_named():
    shown = behind(barrier(1, number=4, is_async=True))
    (finding,) = alarms(AsyncCollectiveUsedAsBarrier, shown)
    assert finding.ranks == RankSet([1])
    assert (
        "before it has waited for barrier #4 in group default_pg at train.py:7" in finding.message
    )
    assert not alarms(UnorderedFileAccess, shown)


def test_a_collective_without_the_writer_is_not_the_reason():
    elsewhere = replace(barrier(1, is_async=True), group=ProcessGroup("1", "tp", (1, 2), "gloo"))
    assert not alarms(AsyncCollectiveUsedAsBarrier, behind(elsewhere))
    assert alarms(UnorderedFileAccess, behind(elsewhere))


def on_stream(rank, number):
    group = ProcessGroup("0", "default_pg", (0, 1, 2, 3), "nccl")
    call = barrier(rank, number=number)
    sign = replace(call.signature, op="all_reduce")
    return replace(call, group=group, signature=sign)


def test_a_collective_that_only_the_stream_waits_for_is_named():
    (finding,) = alarms(AsyncCollectiveUsedAsBarrier, behind(on_stream(1, 4)))
    assert "while all_reduce #4 in group default_pg at train.py:7 may still run" in finding.message
    assert "only the stream waits for it" in finding.message


def test_a_collective_before_the_change_is_not_the_reason():
    shown = race(
        "read-of-write",
        [access(0, "write", plain_site(3), unwaited=[on_stream(0, 4)])],
        [access(1, "read", plain_site(9), unwaited=[on_stream(1, 4)])],
    )
    assert not alarms(AsyncCollectiveUsedAsBarrier, shown)
    assert alarms(UnorderedFileAccess, shown)
