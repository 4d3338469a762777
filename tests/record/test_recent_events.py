"""The newest events of a rank: the right ones, however long the file, and whatever befell it."""

import pytest

from distdiag.events.collectives import Collective, CollectiveState
from distdiag.events.lifecycle import StepEnd
from distdiag.record.event_file import ISSUED, WAITED, EventWriter
from distdiag.record.event_reader import EventReader
from distdiag.record.recent_events import read_recent, recorded_ranks
from distdiag.record.wire import EventDecoder, Interner
from tests.reports.synthetic_run import SyntheticRank


def all_events(folder, rank):
    reader, decoder = EventReader(folder, rank), EventDecoder(rank, Interner())
    return [event for event in map(decoder.decode, reader.payloads()) if event is not None]


def write(folder, steps, rank=0, **options):
    writer = SyntheticRank(folder, rank, 2, **options)
    for step in range(steps):
        writer.step(step, 4)
    return writer


def test_all_events_of_a_short_run_are_those_that_the_reader_follows(tmp_path):
    write(tmp_path, 5)
    recent = read_recent(tmp_path, 0, Interner(), 10_000)
    assert list(recent.events) == all_events(tmp_path, 0)
    assert recent.num_left_out == 0
    assert recent.started == recent.events[0]


def test_of_a_long_run_the_last_ones_come_with_their_definitions(tmp_path):
    write(tmp_path, 500, segment_bytes=1 << 15)
    assert len(list(tmp_path.glob("rank-0.*"))) > 3
    every = all_events(tmp_path, 0)
    recent = read_recent(tmp_path, 0, Interner(), 500)
    assert list(recent.events) == every[-500:]
    assert recent.num_left_out > 0
    assert recent.started == every[0]
    steps = [event.step for event in recent.events if isinstance(event, StepEnd)]
    assert steps[-1] == 499


def test_how_far_a_call_went_is_told_by_its_mark(tmp_path):
    writer = SyntheticRank(tmp_path, 0, 2)
    records = []
    append = EventWriter.append
    for mark in (0, ISSUED, WAITED):
        writer.writer.append = lambda record: records.append(record)
        writer.call(1000, 0)
        place = writer.writer.append_call(records[-2])
        writer.writer.append = append.__get__(writer.writer)
        if mark:
            assert writer.writer.mark(place, mark)
    recent = read_recent(tmp_path, 0, Interner(), 100)
    calls = [event for event in recent.events if isinstance(event, Collective)]
    states = [event.state for event in recent.events if isinstance(event, CollectiveState)]
    assert len(calls) == 3
    assert states == ["issued", "issued", "waited"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", ""),
        (bytes(100), ""),
        (b"something else entirely", "is not an event file"),
        (b"ddevnt02" + bytes(8) + b"\xff\xff\xff\x7f", "record at byte 16 claims"),
        (b"ddevnt02" + bytes(8) + b"\x03\x00\x00\x00abc", "is damaged"),
    ],
)
def test_damage_is_told_and_ends_nothing(tmp_path, content, problem):
    (tmp_path / "rank-0.000000.events").write_bytes(content)
    write(tmp_path, 1, rank=1)
    recent = read_recent(tmp_path, 0, Interner(), 100)
    assert recent.events == ()
    assert problem in recent.problem and bool(problem) == bool(recent.problem)
    assert read_recent(tmp_path, 1, Interner(), 100).events


def test_ranks_are_found_by_their_files(tmp_path):
    for name in ("rank-3.000000.events", "rank-10.000001.events", "rank-x.1.events"):
        (tmp_path / name).touch()
    (tmp_path / "rank-1.status").touch()
    assert recorded_ranks(tmp_path) == [3, 10]
