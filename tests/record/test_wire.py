from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import Collective, GroupCreated, ProcessGroup, Signature
from distdiag.events.errors import DamagedFileError
from distdiag.events.files import (
    FileAccess,
    FileAction,
    FileClosed,
    FileContent,
    HostSynced,
    StoreCall,
)
from distdiag.events.lifecycle import (
    EventsLost,
    Exited,
    Finished,
    Heartbeat,
    Monitored,
    ProbeDisabled,
    Raised,
    RankStarted,
    Signalled,
    StepEnd,
    TorchLoaded,
)
from distdiag.events.stacks import Observed, Stacks, ThreadStack
from distdiag.findings import report_json
from distdiag.record import wire
from distdiag.record.wire import EventDecoder, Interner, encode

FRAME = Frame("train.py", 3, "main")
COMMON = {"rank": 2, "seq": 9, "time_ns": 123, "step": 4}
EVENTS = [
    FileAccess(
        **COMMON,
        action=FileAction.RENAME,
        path="/a",
        written="a",
        origin="/b",
        site=CallSite((FRAME,)),
    ),
    FileClosed(**COMMON, access=7, content=FileContent(3, (1,))),
    StoreCall(**COMMON, action="set", store="host:1", keys=("k",), value="v"),
    HostSynced(**COMMON, api="synchronize"),
    RankStarted(
        **COMMON, local_rank=0, world_size=2, hostname="h", pid=1, python="3", command=("a",),
        unix_ns=5,
    ),
    TorchLoaded(**COMMON, torch="2", tap="dispatcher"),
    GroupCreated(
        **COMMON, api="new_group", ordinal=1, scope=(0, 1), ranks=(1,), desc="d", generation=0,
        site=CallSite((FRAME,), "m"), timeout_s=1.5,
    ),
    StepEnd(**COMMON, duration_s=0.5, num_backwards=1),
    Raised(**COMMON, type="KeyError", message="x", frames=(FRAME,), traceback="t"),
    Signalled(**COMMON, signal=15, frames=(FRAME,)),
    Finished(**COMMON, exit_status=3),
    ProbeDisabled(**COMMON, probe="p", reason="r"),
    Heartbeat(**COMMON, phase=Phase.BACKWARD, beat_ns=7),
    Exited(**COMMON, reason="SIGKILL", gone_ns=8),
    Monitored(**COMMON, act="aborted"),
    Stacks(**COMMON, source="py-spy", threads=(ThreadStack("MainThread", (FRAME,)),)),
    Observed(**COMMON, source="process", summary="it sleeps", values={"rss_bytes": 5}),
]  # fmt: skip
GROUP = ProcessGroup("0", "default_pg", (0, 1), "gloo")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_equal(event: object) -> None:
    assert EventDecoder(2, Interner()).decode(encode(event)) == event


def _definitions() -> list[bytes]:
    return [
        encode(wire.DefineGroup(1, GROUP)),
        encode(wire.DefineSignature(2, Signature("barrier"))),
        encode(wire.DefineFrame(3, FRAME)),
        encode(wire.DefineSite(4, (3,), None)),
    ]


def test_a_call_record_is_a_collective_of_what_was_defined() -> None:
    decoder = EventDecoder(0, Interner())
    assert [decoder.decode(payload) for payload in _definitions()] == [None] * 4

    event = decoder.decode(encode(wire.CallRecord(7, 8, 0, 1, 5, 2, 4, True, None, None)))

    assert event == Collective(
        rank=0, seq=7, time_ns=8, group=GROUP, collective_seq_id=5, signature=Signature("barrier"),
        site=CallSite((FRAME,)), is_async=True,
    )  # fmt: skip


def test_a_tuple_that_begins_with_the_tag_is_the_record() -> None:
    fields = (7, 8, 0, 1, 5, 2, 4, True, None, "all_reduce")

    assert encode(("C", *fields)) == encode(wire.CallRecord(*fields))
    assert encode(("T", 1, 2, 3, 4, 0)) == encode(wire.StateRecord(1, 2, 3, 4, 0))


def test_equal_values_of_two_ranks_are_one_object() -> None:
    interner = Interner()
    decoders = [EventDecoder(rank, interner) for rank in (0, 1)]
    record = encode(wire.CallRecord(7, 8, 0, 1, 5, 2, 4, True, None, None))
    events = []
    for decoder in decoders:
        for payload in _definitions():
            decoder.decode(payload)
        events.append(decoder.decode(record))

    first, second = events
    assert isinstance(first, Collective)
    assert isinstance(second, Collective)
    assert first.site is second.site
    assert first.signature is second.signature
    assert (first.rank, second.rank) == (0, 1)


def test_a_reference_to_what_was_never_defined_is_damage() -> None:
    record = encode(wire.CallRecord(7, 8, 0, 1, 5, 2, 4, True, None, None))

    with pytest.raises(DamagedFileError, match="event 7 of rank 3"):
        EventDecoder(3, Interner()).decode(record)


@given(payload=st.binary(max_size=60))
@example(payload=b"\x91\xa2\x00\x80")  # a kind of record that is no UTF-8
def test_any_bytes_are_an_event_or_damage(payload: bytes) -> None:
    try:
        EventDecoder(0, Interner()).decode(payload)
    except DamagedFileError as error:
        assert "rank 0" in str(error)


def test_a_state_outside_the_known_ones_is_damage() -> None:
    record = msgspec.msgpack.encode(["T", 1, 2, 3, 4, 99])

    with pytest.raises(DamagedFileError):
        EventDecoder(0, Interner()).decode(record)


def test_numbers_that_json_does_not_have_are_spelt() -> None:
    spelt = report_json._finite({"a": [math.nan, math.inf, -math.inf, 1.5]})

    assert json.dumps(spelt) == '{"a": ["NaN", "Infinity", "-Infinity", 1.5]}'


class MarkedText(str):
    """Text that a library has marked, as datasets does with the files that it downloads."""

    def __str__(self) -> str:
        return "something else"


def test_marked_text_is_written_as_text():
    access = FileAccess(
        rank=0,
        seq=0,
        time_ns=0,
        action=FileAction.READ,
        path=MarkedText("/data/a.csv"),
        written="a.csv",
        site=CallSite(()),
    )
    decoded = EventDecoder(0, Interner()).decode(encode(access))
    assert isinstance(decoded, FileAccess)
    assert (decoded.path, type(decoded.path)) == ("/data/a.csv", str)


def test_definitions_are_forgotten_when_they_have_been_replaced_twice():
    decoder = EventDecoder(0, Interner())
    site = wire.DefineSite(1, (), "m")
    access = ("A", 1, 2, 0, "read", "/a", "a", 1)
    decoder.decode(encode(site))
    decoder.decode(wire.FORGOTTEN)
    assert decoder.decode(encode(access)).site.module == "m"  # a thread had just looked it up
    decoder.decode(encode(wire.DefineSite(2, (), "n")))
    decoder.decode(wire.FORGOTTEN)
    with pytest.raises(DamagedFileError, match="refers to number 1"):
        decoder.decode(encode(access))


def test_what_refers_to_lost_definitions_is_left_out():
    decoder = EventDecoder(0, Interner())
    decoder.decode(encode(EventsLost(rank=0, seq=-1, time_ns=1, num_segments=3)))
    assert decoder.decode(encode(("A", 1, 2, 0, "read", "/a", "a", 1))) is None


def test_equal_values_are_one_object_for_as_long_as_somebody_holds_it():
    interner = Interner()
    first = interner(CallSite((FRAME,)))
    assert interner(CallSite((FRAME,))) is first
    assert len(interner) == 1
    del first
    assert len(interner) == 0
