"""The trace of a run: what stands on which track, on one time for all ranks."""

import gzip
import json

import pytest

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import ProcessGroup, Signature
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.events.files import FileClosed, StoreAsked, StoreCall
from distdiag.events.lifecycle import Exited, Heartbeat, Raised, RankStarted, StepEnd
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import RunDir
from distdiag.record.status_page import StatusPage
from distdiag.reports.formats import perfetto
from distdiag.reports.formats.perfetto import PerfettoReporter
from distdiag.reports.profiler_trace import ProfilerTrace
from distdiag.reports.recording import Bounds, read_recording
from distdiag.transports.journal import Journal
from tests.reports.samples import HOSTILE, make_finding, make_report

WALL_NS = 1_700_000_000_000_000_000


class Rank:
    """Writes the events of a rank as its agent does; its host has a wall clock of its own."""

    def __init__(self, run_dir, rank, *, host="a", ahead_ns=0, pid=100):
        self.page = StatusPage(run_dir.status(rank))
        self.recorder = Recorder(run_dir.folder, rank, self.page)
        self.event(
            RankStarted,
            local_rank=rank,
            world_size=2,
            hostname=host,
            pid=pid + rank,
            python="3",
            command=("train.py",),
            unix_ns=WALL_NS + ahead_ns,
        )

    def event(self, kind, **fields):
        return self.recorder.event(kind, **fields)

    def call(self, op="all_reduce", number=0, *, thread=None, is_async=False, states=()):
        recorder = self.recorder
        group = ProcessGroup("0", "default_pg", (0, 1), "gloo")
        known = recorder.tables.groups.get(group)
        group_number = recorder.define_group(group, group) if known is None else known
        signature = Signature(op, ((4,),), (), ("float32",), "sum")
        site = CallSite((Frame("train.py", 7, "main"),))
        call = recorder.call(
            group_number,
            number,
            recorder.define_signature(signature, signature),
            recorder.define_site(site, site, api=op, is_own_call=True, kept_alive=None).number,
            is_async,
            thread,
            op,
        )
        for state in states:
            recorder.state(call, state)


@pytest.fixture
def run_dir(tmp_path):
    found = RunDir(tmp_path, 0)
    found.folder.mkdir()
    return found


def trace_of(run_dir, *findings, traces=()):
    reporter = PerfettoReporter(run_dir=run_dir.root, traces=traces)
    return json.loads(reporter.render(make_report(*findings)))


def on_track(trace, rank, track):
    """Return what stands on a track of a rank, without the names of tracks."""
    return [
        event
        for event in trace["traceEvents"]
        if (event["pid"], event.get("tid")) == (rank, track) and event["ph"] != "M"
    ]


def track_names(trace, rank):
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] == rank
    }


def test_steps_calls_files_and_the_end_have_their_tracks(run_dir):
    rank = Rank(run_dir, 0)
    rank.event(StepEnd, duration_s=0.25, num_backwards=1)
    rank.call(states=("issued", "waited"))
    rank.call("broadcast", 1, thread="worker", is_async=True, states=("issued", "waited"))
    rank.event(
        Raised,
        type="ValueError",
        message="bad batch",
        frames=(Frame("train.py", 9, "main"),),
        traceback="",
    )
    trace = trace_of(run_dir)
    names = track_names(trace, 0)
    by_name = {name: on_track(trace, 0, track) for track, name in names.items()}
    (step,) = by_name["optimizer steps"]
    assert (step["name"], step["ph"], step["dur"]) == ("step 0", "X", 250_000)
    (call,) = by_name["collectives of MainThread"]
    assert call["name"] == "all_reduce #0"
    assert call["args"] == {
        "group": "default_pg",
        "group ranks": "[0, 1]",
        "input sizes": "((4,),)",
        "dtypes": "float32",
        "reduce op": "sum",
        "step": "0",
        "at": "train.py:7 in main",
        "state": "waited",
    }
    assert [each["name"] for each in by_name["collectives of worker"]] == ["broadcast #1"]
    assert [each["name"] for each in by_name["process"]] == [
        "the agent started",
        "raised ValueError: bad batch",
    ]


def test_a_call_that_never_returned_reaches_to_the_end(run_dir):
    first, second = Rank(run_dir, 0), Rank(run_dir, 1)
    first.call(states=("issued",))
    second.call(states=("issued", "waited"))
    second.event(StepEnd, duration_s=0.0)
    trace = trace_of(run_dir)
    (stuck,) = on_track(trace, 0, 10)
    (step,) = on_track(trace, 1, 2)
    assert stuck["args"]["state"] == "issued: it had not returned"
    assert stuck["ts"] + stuck["dur"] == pytest.approx(step["ts"], abs=0.01)
    (done,) = on_track(trace, 1, 10)
    assert done["ts"] + done["dur"] < step["ts"] + 0.01


def test_hosts_are_laid_on_one_time_and_the_ranks_of_one_share_its_clock(run_dir):
    for number, (host, ahead_ns) in enumerate([("a", 0), ("a", 5_000_000), ("b", 9_000_000)]):
        Rank(run_dir, number, host=host, ahead_ns=ahead_ns)
    trace = trace_of(run_dir)
    starts = [on_track(trace, rank, 4)[0]["ts"] for rank in range(3)]
    by_rank = read_recording(run_dir.root, Bounds(100, 100)).by_rank
    own = [by_rank[rank].started.time_ns for rank in range(3)]
    # The clock of host a is read once, so the second rank is where the kernel's clock puts it.
    assert starts[1] - starts[0] == pytest.approx((own[1] - own[0]) / 1000, abs=0.01)
    assert starts[2] - starts[0] == pytest.approx(9000, abs=0.01)
    assert int(trace["otherData"]["unix time of 0, in ns"]) == WALL_NS


def test_waits_for_the_store_and_files_are_slices(run_dir):
    rank = Rank(run_dir, 0)
    rank.event(StoreAsked, action="get", store="s", keys=("k",))
    rank.event(StoreCall, action="get", store="s", keys=("k",), done=True)
    rank.event(StoreAsked, action="wait", store="s", keys=("never",))
    site = rank.recorder.define_site
    known = CallSite((Frame("train.py", 7, "main"),))
    number = site(known, known, api="open", is_own_call=True, kept_alive=None).number
    access = rank.recorder.access("write", "/x/a.pt", "a.pt", number, "torch.save")
    rank.event(FileClosed, access=access)
    trace = trace_of(run_dir)
    waits = on_track(trace, 0, 5)
    assert [wait["name"] for wait in waits] == ["store get", "store wait"]
    (file,) = on_track(trace, 0, 6)
    assert (file["name"], file["args"]["path"]) == ("write torch.save", "a.pt")
    assert file["dur"] > 0


def test_a_finding_is_marked_on_its_ranks_at_its_step(run_dir):
    for number in (0, 1):
        rank = Rank(run_dir, number)
        rank.event(StepEnd, duration_s=0.0)
        rank.recorder.step = 1
        rank.event(StepEnd, duration_s=0.0)
    trace = trace_of(run_dir, make_finding(step=0), make_finding(step=None, code="COL004"))
    first, second = on_track(trace, 1, 1)
    steps = on_track(trace, 1, 2)
    assert (first["ph"], first["name"]) == ("i", "error COL003 collective-shape-mismatch")
    assert [first["ts"], second["ts"]] == [step["ts"] for step in steps]
    assert on_track(trace, 0, 1) == []


def test_what_the_monitor_saw_stands_there_too(run_dir):
    Rank(run_dir, 0)
    journal = Journal(run_dir.journal)
    for time_ns, phase in ((1, Phase.FORWARD), (5, Phase.FORWARD), (9, Phase.BACKWARD)):
        journal.write(Heartbeat(rank=0, seq=-1, time_ns=time_ns, phase=phase, beat_ns=0))
        journal.write(Exited(rank=1, seq=-1, time_ns=time_ns))  # heartbeats are kept for events
    journal.write(Exited(rank=0, seq=-1, time_ns=10, status=-9))
    trace = trace_of(run_dir)
    assert "the process was gone (-9)" in [each["name"] for each in on_track(trace, 0, 4)]
    assert [each["name"] for each in on_track(trace, 0, 3)] == ["forward", "backward"]


def test_of_many_events_the_newest_are_drawn_and_the_others_counted(run_dir, monkeypatch):
    rank = Rank(run_dir, 0)
    for _ in range(50):
        rank.event(StepEnd, duration_s=0.0)
        rank.recorder.step += 1
    monkeypatch.setattr(perfetto, "MOST_EVENTS", 10)
    trace = trace_of(run_dir)
    assert [each["name"] for each in on_track(trace, 0, 2)][-1] == "step 49"
    assert len(on_track(trace, 0, 2)) == 10
    assert trace["otherData"]["left out"] == "41 older events"


def test_a_report_without_a_run_directory_has_no_trace(tmp_path):
    for run_dir in (None, tmp_path):
        with pytest.raises(UsageError, match="a trace needs a run directory"):
            PerfettoReporter(run_dir=run_dir).render(make_report())


def test_damage_ends_the_events_of_a_rank_and_is_told(run_dir):
    Rank(run_dir, 0)
    (run_dir.folder / "rank-1.000000.events").write_bytes(b"no event file at all")
    trace = trace_of(run_dir)
    assert "is not an event file" in trace["otherData"]["rank 1"]
    assert on_track(trace, 0, 4)


@pytest.mark.parametrize("text", [*HOSTILE, "x" * 100_000])
def test_hostile_records_stay_text_of_bounded_length(run_dir, text):
    rank = Rank(run_dir, 0, host=text.encode("utf-8", "replace").decode())
    clean = text.encode("utf-8", "replace").decode()
    rank.event(Raised, type=clean, message=clean, frames=(), traceback="")
    trace = trace_of(run_dir, make_finding(message=text, ranks=make_finding().ranks | {0}))
    shown = json.dumps(trace)
    assert len(shown) < 30_000
    for event in trace["traceEvents"]:
        assert all(value.isprintable() for value in [event["name"], *strings_of(event["args"])])


def strings_of(args):
    return [value for value in args.values() if isinstance(value, str)]


# Traces of torch's profiler.


def profile(**changes):
    trace = {
        "baseTimeNanoseconds": WALL_NS,
        "distributedInfo": {"rank": 1},
        "traceEvents": [
            {"ph": "X", "name": "aten::add", "pid": 101, "tid": 101, "ts": 3.0, "dur": 1.0},
            {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 4.0, "dur": 1.0},
            {"ph": "s", "id": 5, "name": "flow", "pid": 101, "tid": 101, "ts": 3.0},
            {"ph": "M", "name": "process_name", "pid": 101, "args": {"name": "python"}},
        ],
    }
    return {key: value for key, value in (trace | changes).items() if value is not None}


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_trace_of_the_profiler_stands_at_its_rank(run_dir, tmp_path, is_packed):
    for number in (0, 1):
        Rank(run_dir, number, ahead_ns=1_000_000)
    path = tmp_path / "trace.json"
    data = json.dumps(profile()).encode()
    path.write_bytes(gzip.compress(data) if is_packed else data)
    trace = trace_of(run_dir, traces=(path,))
    by_name = {event["name"]: event for event in trace["traceEvents"]}
    # The rank began 1 ms after the profiler's time 0.
    assert (by_name["aten::add"]["pid"], by_name["aten::add"]["ts"]) == (1, -997.0)
    assert by_name["kernel"]["pid"] == "rank 1: 0"
    assert by_name["flow"]["id"] == "1.5"
    assert by_name["process_name"]["args"]["name"].startswith("rank ")


@pytest.mark.parametrize(
    ("name", "changes", "rank"),
    [
        ("trace.json", {}, 1),
        ("rank-3.json", {}, 1),
        ("trace.json", {"distributedInfo": None}, 1),
        ("rank-3.json", {"distributedInfo": None, "traceEvents": []}, 3),
        ("host_rank7.pt.trace.json", {"distributedInfo": None, "traceEvents": []}, 7),
    ],
)
def test_the_trace_its_process_or_its_name_tells_the_rank(tmp_path, name, changes, rank):
    path = tmp_path / name
    path.write_text(json.dumps(profile(**changes)))
    assert ProfilerTrace(path, {100: 0, 101: 1}).rank == rank


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        (None, UsageError, "cannot be read"),
        (b"", DamagedFileError, "not a trace"),
        (b"[1]", DamagedFileError, "not a trace"),
        (b"{}", DamagedFileError, "not a trace"),
        (b"\x1f\x8bxx", DamagedFileError, "not a trace"),
        (b"[" * 100_000, DamagedFileError, "not a trace"),
        (b'{"traceEvents": []}', UsageError, "nothing tells which rank this trace is of"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, content, error, problem):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=problem):
        ProfilerTrace(path, {})
