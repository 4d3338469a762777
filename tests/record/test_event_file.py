from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import EventsLost
from distdiag.record.event_file import ISSUED, WAITED, EventWriter, segment_path
from distdiag.record.event_reader import EventReader
from distdiag.record.wire import EventDecoder, Interner, encode


def _writer(folder: Path, segment_bytes: int = 4096) -> EventWriter:
    return EventWriter(folder, 0, on_forget=lambda: None, segment_bytes=segment_bytes)


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    writer, reader = _writer(tmp_path), EventReader(tmp_path, 0)

    writer.append(b"one")
    assert list(reader.payloads()) == [b"one"]
    assert list(reader.payloads()) == []
    writer.append(b"two")
    assert list(reader.payloads()) == [b"two"]


def test_a_reader_may_come_before_the_writer(tmp_path: Path) -> None:
    reader = EventReader(tmp_path, 0)
    assert list(reader.payloads()) == []

    _writer(tmp_path).append(b"one")

    assert list(reader.payloads()) == [b"one"]


@settings(max_examples=30, deadline=None)
@given(payloads=st.lists(st.binary(min_size=1, max_size=900), max_size=60))
def test_every_record_comes_back_once_in_order_over_all_segments(
    payloads: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    writer = _writer(folder)
    for payload in payloads:
        writer.append(payload)

    assert list(EventReader(folder, 0).payloads()) == payloads


def test_each_segment_begins_with_the_definitions(tmp_path: Path) -> None:
    writer = _writer(tmp_path, 256)
    writer.define(b"definition")
    for number in range(20):
        writer.append(b"record %02d" % number)

    payloads = list(EventReader(tmp_path, 0).payloads())
    num_segments = len(list(tmp_path.glob("*.events")))
    assert num_segments > 1
    assert payloads.count(b"definition") == num_segments


def test_definitions_that_fill_half_a_segment_are_forgotten(tmp_path: Path) -> None:
    forgotten: list[bool] = []
    writer = EventWriter(tmp_path, 0, on_forget=lambda: forgotten.append(True), segment_bytes=256)

    for number in range(20):
        writer.define(b"definition %02d" % number)

    assert forgotten


def test_the_first_and_the_newest_segments_are_kept(
    tmp_path: Path,
) -> None:
    writer = EventWriter(tmp_path, 0, on_forget=lambda: None, segment_bytes=64, kept_segments=3)
    for number in range(40):
        writer.append(b"record %02d" % number)

    kept = sorted(int(path.name.split(".")[1]) for path in tmp_path.glob("*.events"))
    assert kept[0] == 0
    assert len(kept) == 3
    payloads = list(EventReader(tmp_path, 0).payloads())
    assert payloads[0] == b"record 00"
    assert payloads[-1] == b"record 39"
    (lost,) = (p for p in payloads if not p.startswith(b"record"))
    event = EventDecoder(0, Interner()).decode(lost)
    assert isinstance(event, EventsLost)
    assert event.num_segments == kept[1] - 1


def test_a_segment_that_is_dropped_before_it_could_be_opened_stops_no_reader(
    tmp_path: Path,
) -> None:
    reader = EventReader(tmp_path, 0, first=1)
    writer = EventWriter(tmp_path, 0, on_forget=lambda: None, segment_bytes=64, kept_segments=3)
    writer.append(b"record 00")
    assert list(reader.payloads()) == []  # its segment is to come
    for number in range(1, 40):
        writer.append(b"record %02d" % number)

    kept = sorted(int(path.name.split(".")[1]) for path in tmp_path.glob("*.events"))
    lost, *payloads = reader.payloads()
    event = EventDecoder(0, Interner()).decode(lost)
    assert isinstance(event, EventsLost)
    assert event.num_segments == kept[1] - 1
    assert payloads[-1] == b"record 39"


def test_a_record_that_fits_nowhere_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    writer = _writer(tmp_path, 256)

    writer.append(b"before")
    writer.append(b"x" * 1000)
    writer.append(b"after")

    assert list(EventReader(tmp_path, 0).payloads()) == [b"before", b"after"]


def test_threads_lose_nothing_and_wait_for_nobody(tmp_path: Path) -> None:
    writer = _writer(tmp_path, 1 << 14)

    def work(name: int) -> None:
        for number in range(500):
            writer.append(b"%d:%d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    payloads = list(EventReader(tmp_path, 0).payloads())
    assert len(payloads) == 2000
    for name in range(4):
        own = [p for p in payloads if p.startswith(b"%d:" % name)]
        assert own == [b"%d:%d" % (name, number) for number in range(500)]


def test_a_record_made_by_a_signal_handler_in_the_middle_of_another_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = _writer(tmp_path)
    write = EventWriter._write

    def interrupted(self: EventWriter, payload: bytes) -> None:
        if payload == b"outer":
            self.append(b"inner")  # what a handler does on the same thread
        write(self, payload)

    monkeypatch.setattr(EventWriter, "_write", interrupted)
    writer.append(b"outer")

    assert list(EventReader(tmp_path, 0).payloads()) == [b"outer", b"inner"]


def test_what_was_written_outlives_sigkill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from distdiag.record.event_file import EventWriter\n"
        "w = EventWriter(Path(sys.argv[1]), 0, on_forget=lambda: None)\n"
        "for n in range(1000): w.append(b'%d' % n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)

    assert done.returncode == -signal.SIGKILL
    assert list(EventReader(tmp_path, 0).payloads()) == [b"%d" % n for n in range(1000)]


def test_a_disk_without_room_stops_the_writer_and_not_the_process(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for _ in range(100):
            writer.append(b"x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

    assert isinstance(writer.stopped, OSError)
    kept = list(EventReader(tmp_path, 0).payloads())
    assert kept
    assert set(kept) == {b"x" * 200}


def test_nobody_else_may_read_the_file(tmp_path: Path) -> None:
    _writer(tmp_path)

    assert os.stat(segment_path(tmp_path, 0, 0)).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"x" * 4096,
        b"ddevnt02" + struct.pack("<ii", 0, 0) + struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        b"ddevnt02" + struct.pack("<ii", 0, 0) + struct.pack("<I", 5000) + b"x" * 100,
    ],
    ids=["foreign", "endless record", "record beyond the end"],
)
def test_a_damaged_segment_is_said_with_its_path(content: bytes, tmp_path: Path) -> None:
    path = segment_path(tmp_path, 0, 0)
    path.write_bytes(content)

    with pytest.raises(DamagedFileError, match=str(path)):
        list(EventReader(tmp_path, 0).payloads())


@pytest.mark.parametrize("size", [0, 7, 16, 18])
def test_a_segment_that_was_only_begun_is_empty(size: int, tmp_path: Path) -> None:
    whole = b"ddevnt02" + struct.pack("<ii", 0, 0) + bytes(20)
    segment_path(tmp_path, 0, 0).write_bytes(whole[:size])

    assert list(EventReader(tmp_path, 0).payloads()) == []


def test_an_abandoned_writer_touches_the_file_no_more(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.append(b"one")

    writer.abandon()
    writer.append(b"two")

    assert list(EventReader(tmp_path, 0).payloads()) == [b"one"]


# Marks: how far a call went, without a record


def _call(seq: int, *, is_async: bool = False) -> bytes:
    return encode(("C", seq, 1000 + seq, 7, 0, seq, 0, 0, is_async, None, None))


def _states(payloads: list[bytes]) -> list[tuple[int, int]]:
    records = [msgspec.msgpack.decode(payload) for payload in payloads]
    return [(record[4], record[5]) for record in records if record[0] == "T"]


def test_a_mark_is_read_as_the_state_that_it_stands_for(tmp_path: Path) -> None:
    writer, reader = _writer(tmp_path), EventReader(tmp_path, 0)
    place = writer.append_call(_call(3))
    assert list(reader.payloads()) == [_call(3)]

    assert writer.mark(place, ISSUED)
    assert _states(list(reader.payloads())) == [(3, 0)]
    assert writer.mark(place, WAITED)
    assert _states(list(reader.payloads())) == [(3, 1)]
    assert not list(reader.payloads())


def test_marks_come_after_their_call_and_before_the_next_record(tmp_path: Path) -> None:
    writer, reader = _writer(tmp_path), EventReader(tmp_path, 0)
    first = writer.append_call(_call(1))
    writer.mark(first, WAITED)
    writer.append_call(_call(2, is_async=True))
    writer.append(b"three")

    seen = list(reader.payloads())

    assert seen[0] == _call(1)
    assert _states(seen[1:3]) == [(1, 0), (1, 1)]
    assert seen[3:] == [_call(2, is_async=True), b"three"]


def test_a_mark_in_a_segment_that_is_full_is_seen_and_later_ones_must_be_records(
    tmp_path: Path,
) -> None:
    writer, reader = _writer(tmp_path, 256), EventReader(tmp_path, 0)
    place = writer.append_call(_call(1))
    assert list(reader.payloads()) == [_call(1)]
    writer.mark(place, ISSUED)
    while (tmp_path / segment_path(tmp_path, 0, 1).name).exists() is False:
        writer.append(b"x" * 60)

    assert not writer.mark(place, WAITED)
    assert _states([p for p in reader.payloads() if not p.startswith(b"x")]) == [(1, 0)]


def test_asynchronous_calls_are_not_followed_beyond_being_issued(tmp_path: Path) -> None:
    writer, reader = _writer(tmp_path, 1 << 16), EventReader(tmp_path, 0)
    for seq in range(600):
        writer.mark(writer.append_call(_call(seq, is_async=True)), ISSUED)
    assert len(_states(list(reader.payloads()))) == 600

    place = writer.append_call(_call(601))
    assert list(reader.payloads()) == [_call(601)]
    writer.mark(place, WAITED)
    assert _states(list(reader.payloads())) == [(601, 0), (601, 1)]
