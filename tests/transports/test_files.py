"""The files of a rank become its events, and what cannot be read is said once."""

from typing import NamedTuple

import pytest

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.lifecycle import EventsLost, Exited, Finished, Heartbeat, ProbeDisabled, Raised
from distdiag.record.event_file import segment_path
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import RunDir
from distdiag.record.status_page import DETACHED, EVENTS_STOPPED, FINISHED, RAISED, StatusPage
from distdiag.record.wire import Interner
from distdiag.transports.files import BATCH, LocalFiles

SECOND = 1_000_000_000


class Reading(NamedTuple):
    cpu_s: float


class FakeProcess:
    """A process that ends when the test says so."""

    exit_status = -9

    def __init__(self):
        self.is_gone = False

    def read(self):
        return None if self.is_gone else Reading(1.5)


class Node:
    """Two ranks that write, and the source that reads them."""

    def __init__(self, folder):
        self.run_dir = RunDir(folder, 0)
        self.run_dir.folder.mkdir(parents=True)
        self.now_ns = 1 << 62  # later than what the ranks write with the real clock
        self.processes = []
        self.source = LocalFiles(
            self.run_dir, (0, 1), self.watch, Interner(), clock=lambda: self.now_ns
        )

    def watch(self, pid, start_ticks):
        assert start_ticks > 0
        self.processes.append(FakeProcess())
        return self.processes[-1]

    def rank(self, rank):
        page = StatusPage(self.run_dir.status(rank))
        return Recorder(self.run_dir.folder, rank, page), page

    def poll(self, *kinds):
        return [event for event in self.source.poll() if isinstance(event, kinds or object)]


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def finish(recorder, status=0):
    recorder.event(Finished, exit_status=status)
    recorder.raise_flag(FINISHED)


def call(recorder):
    group = recorder.define_group("g", ProcessGroup("0", "default_pg", (0, 1), "gloo"))
    signature = recorder.define_signature("s", Signature("all_reduce", ((4,),)))
    frames = (Frame("train.py", 3, "main"),)
    site = recorder.define_site("l", CallSite(frames), api=None, is_own_call=True, kept_alive=None)
    return recorder.call(group, 0, signature, site.number, False, None, None)


def test_before_a_rank_begins_there_is_nothing(node):
    assert node.poll() == []
    assert node.source.pids == {}


def test_equal_values_of_two_ranks_are_identical(node):
    for rank in (0, 1):
        call(node.rank(rank)[0])
    first, second = node.poll(Collective)
    assert (first.rank, second.rank) == (0, 1)
    assert first.site is second.site
    assert first.signature is second.signature
    assert first.group is second.group


def test_events_come_before_the_exit_that_followed_them(node):
    recorder, _ = node.rank(0)
    node.poll()
    finish(recorder)
    node.processes[0].is_gone = True
    kinds = [type(event) for event in node.poll()]
    assert kinds == [Finished, Exited]
    assert node.poll() == []


def test_an_exit_waits_until_a_long_file_is_read_to_its_end(node):
    recorder, _ = node.rank(0)
    number = call(recorder)
    for _ in range(BATCH):
        recorder.state(number, "waited")
    finish(recorder)
    node.poll()
    node.processes[0].is_gone = True
    kinds = [type(event) for event in node.poll()]
    assert kinds[-2:] == [Finished, Exited]


def test_a_death_is_dated_to_when_the_process_was_last_seen_alive(node):
    node.rank(0)
    node.poll()
    node.now_ns += SECOND
    node.poll()
    seen_ns = node.now_ns
    node.now_ns += SECOND
    node.processes[0].is_gone = True
    (exited,) = node.poll(Exited)
    assert (exited.time_ns, exited.gone_ns, exited.status) == (seen_ns, node.now_ns, -9)


@pytest.mark.parametrize("status", [None, -9])
def test_a_death_that_came_before_anybody_looked_is_dated_by_its_status(node, status):
    _, page = node.rank(0)
    page.beat(5 * SECOND, 1)
    watch = node.watch

    def watch_late(pid, start_ticks):
        process = watch(pid, start_ticks)
        process.is_gone, process.exit_status = True, status
        return process

    node.source = LocalFiles(
        node.run_dir, (0, 1), watch_late, Interner(), clock=lambda: node.now_ns
    )
    (exited,) = node.poll(Exited)
    # Without a status it may be what others did that ended it.
    assert exited.time_ns == (node.now_ns if status is None else 5 * SECOND)
    assert exited.gone_ns == node.now_ns


def test_a_process_that_ended_well_without_a_word_has_finished(node):
    node.rank(0)
    node.poll()
    node.processes[0].is_gone, node.processes[0].exit_status = True, 0
    finished, exited = node.poll(Finished, Exited)
    assert (finished.exit_status, exited.status) == (0, 0)


def test_heartbeats_come_twice_a_second_or_when_the_rank_moved_on(node):
    _, page = node.rank(0)
    (first,) = node.poll(Heartbeat)
    assert (first.phase, first.cpu_s) == (Phase.STARTING, 1.5)
    assert node.poll(Heartbeat) == []
    page.set_phase(Phase.BACKWARD)
    page.set_progress(step=3, num_batches=4, num_backwards=5)
    (second,) = node.poll(Heartbeat)
    assert (second.phase, second.step) == (Phase.BACKWARD, 3)
    assert (second.num_batches, second.num_backwards) == (4, 5)
    node.now_ns += SECOND
    assert len(node.poll(Heartbeat)) == 1


def test_a_page_that_is_being_made_is_not_damaged(node):
    node.run_dir.status(0).write_bytes(bytes(4096))
    assert node.poll() == []
    node.run_dir.status(0).write_bytes(b"")
    assert node.poll() == []


def test_a_foreign_page_is_reported_once_and_the_other_rank_is_read(node):
    node.run_dir.status(0).write_bytes(b"something else" * 100)
    finish(node.rank(1)[0])
    first = node.poll(ProbeDisabled, Finished)
    assert [type(event) for event in first] == [ProbeDisabled, Finished]
    assert first[0].probe == "status-page"
    assert node.poll(ProbeDisabled) == []


def test_a_damaged_record_is_reported_once_and_the_rest_goes_on(node):
    recorder, _ = node.rank(0)
    node.poll()
    recorder._writer.append(b"\xc1 no MessagePack")
    recorder._writer.append(b"\xc1 again")
    finish(recorder)
    disabled, finished = node.poll(ProbeDisabled, Finished)
    assert disabled.probe == "event-file"
    assert "damaged" in disabled.reason
    assert isinstance(finished, Finished)


def test_a_damaged_segment_is_reported_once_and_the_page_still_speaks(node):
    recorder, page = node.rank(0)
    with segment_path(node.run_dir.folder, 0, 0).open("r+b") as file:
        file.seek(16)
        file.write(b"\xff\xff\xff\x7f")
    (disabled,) = node.poll(ProbeDisabled)
    assert "claims" in disabled.reason
    finish(recorder)
    (finished,) = node.poll(ProbeDisabled, Finished)
    assert finished.exit_status == 0
    page.set_phase(Phase.OPTIMIZER)
    assert len(node.poll(Heartbeat)) == 1


def test_segments_that_were_dropped_before_they_were_read_are_reported(node):
    recorder, _ = node.rank(0)
    number = call(recorder)
    recorder._writer._segment_bytes = 0  # every record opens a new segment
    assert len(node.poll(Collective)) == 1
    recorder._writer._segment_bytes = 1 << 20
    for _ in range(2):
        recorder._writer._next_segment()
        recorder.state(number, "waited")
    segment_path(node.run_dir.folder, 0, 1).unlink()
    (lost,) = node.poll(EventsLost)
    assert (lost.rank, lost.num_segments) == (0, 1)


def test_on_a_full_disk_the_page_says_how_the_rank_ended(node):
    _, page = node.rank(0)
    _, other = node.rank(1)
    page.raise_flag(EVENTS_STOPPED)
    page.raise_flag(FINISHED)
    other.raise_flag(EVENTS_STOPPED)
    other.raise_flag(RAISED)
    found = node.poll(ProbeDisabled, Finished, Raised)
    assert [(event.rank, type(event)) for event in found] == [
        (0, ProbeDisabled),
        (0, Finished),
        (1, ProbeDisabled),
        (1, Raised),
    ]
    assert node.poll(ProbeDisabled, Finished, Raised) == []


def test_a_rank_that_detached_and_left_has_not_died(node):
    _, page = node.rank(0)
    page.raise_flag(DETACHED)
    node.poll()
    node.processes[0].is_gone = True
    assert [type(event) for event in node.poll()] == [Finished, Exited]


def test_a_page_that_vanished_does_not_end_the_watch(node):
    recorder, _ = node.rank(0)
    node.poll()
    node.run_dir.status(0).unlink()
    finish(recorder)
    found = node.poll(ProbeDisabled, Finished)
    assert {type(event) for event in found} == {ProbeDisabled, Finished}


def test_of_a_rank_without_an_agent_only_the_reason_is_reported(tmp_path):
    node = Node(tmp_path / "run")
    segment_path(node.run_dir.folder, 1, 0).write_text("not its own")
    node.run_dir.unobserved(1).write_text("its agent could not start: no room")
    (event,) = node.source.poll()
    assert (type(event), event.rank, event.probe) == (ProbeDisabled, 1, "agent")
    assert event.reason == "its agent could not start: no room"
    assert list(node.source.poll()) == []
    assert node.source.pids == {}
