from __future__ import annotations

import threading
from pathlib import Path

import pytest

from distdiag.events.base import CallSite, Event, Frame, Phase
from distdiag.events.collectives import Collective, CollectiveState, ProcessGroup, Signature
from distdiag.events.lifecycle import StepEnd
from distdiag.record import recorder as recorder_module
from distdiag.record.event_file import EventWriter
from distdiag.record.event_reader import EventReader
from distdiag.record.recorder import Recorder
from distdiag.record.status_page import StatusPage, read_status
from distdiag.record.wire import EventDecoder, Interner

GROUP = ProcessGroup("0", "default_pg", (0, 1), "gloo")
SIGNATURE = Signature("all_reduce", ((4,),), dtypes=("float32",), reduce_op="SUM")
SITE = CallSite(
    (Frame("train.py", 3, "main"), Frame("torch/x.py", 9, "call", user=False)), "layers.0"
)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, 0, StatusPage(tmp_path / "rank-0.status"))


def _events(folder: Path) -> list[Event]:
    decoder = EventDecoder(0, Interner())
    decoded = [decoder.decode(payload) for payload in EventReader(folder, 0).payloads()]
    return [event for event in decoded if event is not None]


def _call(recorder: Recorder, seq_id: int = 1) -> int:
    tables = recorder.tables
    group = tables.groups.get("g")
    signature = tables.signatures.get("s")
    site = tables.sites.get("l")
    return recorder.call(
        recorder.define_group("g", GROUP) if group is None else group,
        seq_id,
        recorder.define_signature("s", SIGNATURE) if signature is None else signature,
        (
            site
            or recorder.define_site("l", SITE, api="all_reduce", is_own_call=True, kept_alive=())
        ).number,
        False,
        None,
        "all_reduce",
    )


def test_a_call_comes_back_as_it_was_given(recorder: Recorder, tmp_path: Path) -> None:
    recorder.step = 5

    call = _call(recorder, seq_id=7)
    recorder.state(call, "issued")

    collective, state = _events(tmp_path)
    assert isinstance(collective, Collective)
    assert (collective.group, collective.signature, collective.site) == (GROUP, SIGNATURE, SITE)
    assert (collective.collective_seq_id, collective.step, collective.seq) == (7, 5, call)
    assert (collective.thread, collective.api) == ("MainThread", "all_reduce")
    assert isinstance(state, CollectiveState)
    assert (state.call, state.state) == (call, "issued")


def test_repeated_values_are_written_once(recorder: Recorder, tmp_path: Path) -> None:
    for seq_id in range(10):
        _call(recorder, seq_id)

    payloads = list(EventReader(tmp_path, 0).payloads())
    # A group, a signature, two frames, a site, and ten calls.
    assert len(payloads) == 5 + 10


def test_event_numbers_are_distinct_and_complete_over_all_threads(
    recorder: Recorder, tmp_path: Path
) -> None:
    _call(recorder)

    def work() -> None:
        for seq_id in range(300):
            recorder.state(_call(recorder, seq_id), "issued")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(event.seq for event in _events(tmp_path)) == list(range(1 + 4 * 600))


def test_what_was_forgotten_is_defined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_writer(folder: Path, rank: int, **options: object) -> EventWriter:
        return EventWriter(folder, rank, segment_bytes=1024, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder_module, "EventWriter", small_writer)
    recorder = Recorder(tmp_path, 0, StatusPage(tmp_path / "rank-0.status"))
    for number in range(40):
        group = ProcessGroup(f"group {number}", "x" * 30, (0, 1), "gloo")
        recorder.define_group(group.name, group)
    assert len(recorder.tables.groups) < 40

    _call(recorder)

    assert [type(event) for event in _events(tmp_path)] == [Collective]


def test_rare_events_bear_rank_number_time_and_step(recorder: Recorder, tmp_path: Path) -> None:
    recorder.step = 3

    recorder.event(StepEnd, duration_s=0.5, num_backwards=2)

    (event,) = _events(tmp_path)
    assert isinstance(event, StepEnd)
    assert (event.rank, event.seq, event.step, event.num_backwards) == (0, 0, 3, 2)
    assert event.time_ns > 0


def test_phase_and_progress_show_on_the_status_page(recorder: Recorder, tmp_path: Path) -> None:
    recorder.set_phase(Phase.CHECKPOINT)
    assert read_status(tmp_path / "rank-0.status").phase is Phase.CHECKPOINT
    recorder.step, recorder.num_batches, recorder.num_backwards = 1, 2, 3
    recorder.push_progress()
    _call(recorder)
    recorder.beat()

    status = read_status(tmp_path / "rank-0.status")
    assert (status.step, status.num_batches, status.num_backwards) == (1, 2, 3)
    assert status.phase is Phase.CHECKPOINT
    assert status.num_events == 1
    assert status.beat_ns > 0


def test_a_full_disk_stops_the_events_and_is_said_on_the_status_page(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: EventWriter, index: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventWriter, "_open_segment", no_room)
    for seq_id in range(40_000):
        _call(recorder, seq_id)
    recorder.beat()

    assert read_status(tmp_path / "rank-0.status").events_stopped


def test_an_abandoned_recorder_leaves_the_files_to_its_parent(
    recorder: Recorder, tmp_path: Path
) -> None:
    _call(recorder)
    before = (tmp_path / "rank-0.000000.events").read_bytes()

    recorder.abandon()
    recorder.event(StepEnd, duration_s=1.0)
    recorder.set_phase(Phase.BACKWARD)
    recorder.beat()

    assert (tmp_path / "rank-0.000000.events").read_bytes() == before
    assert read_status(tmp_path / "rank-0.status").phase is Phase.STARTING
