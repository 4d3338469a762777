"""Whatever is read may have been changed by somebody: it is read, or is one documented error.

Each row names what is read, a good example and the errors that its docstring allows. The memory
that it takes is bounded by the size of what is read, not by the numbers that stand in it. Logs,
stacks and curves have tests of their own (`tests/dumps/test_hostile_dumps.py`,
`tests/metrics/readers/test_damage.py`), as have whole run directories
(`tests/analysis/test_hostile_run_folders.py`) and the connections between monitors
(`tests/transports/test_hostile_peers.py`).
"""

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from distdiag.comparison.facts import facts_of
from distdiag.config import load_config
from distdiag.config.tasks import read_summary
from distdiag.dumps.flight_recorder.reader import LEAST_ROOM, FlightRecorder
from distdiag.dumps.nccl_ras.json import parse_json
from distdiag.dumps.nccl_ras.text import parse_text
from distdiag.dumps.reading import Dump
from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.events.lifecycle import Exited, StepEnd
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.findings.baseline import baseline_of, encode_baseline, read_baseline
from distdiag.findings.report_json import encode_report
from distdiag.live.job_dump import NodeDump, RankStacks, read_node_dump
from distdiag.live.ranks import LiveRank
from distdiag.record.event_file import EventWriter
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import ReporterAddress, RunDir, read_reporter_address
from distdiag.record.status_page import StatusPage, read_status
from distdiag.record.wire import EventDecoder, Interner, encode
from distdiag.reports import load_reporter, read_report
from distdiag.reports.profiler_trace import ProfilerTrace
from distdiag.transports.carriers import pack, unpack
from distdiag.transports.frames import FrameReader, LinkError, to_bytes
from distdiag.transports.journal import Journal, read_journal
from tests.dumps.nccl_ras.test_nccl_ras import answer, missing, rank
from tests.mutation import changed_bytes, changed_document, seeded
from tests.reports.samples import make_finding, make_note, make_report
from tests.transports.test_frames import FRAMES

SHORT, LONG = 12, 1500
"""So many changes of each row; 3,000 of each found no more when this test was written."""
BYTES_FOR_EACH, BYTES_AT_LEAST = 400, 48 << 20
"""Memory for each byte that is read (a Python object for two of them), and beside it."""
EVENTS = (
    StepEnd(rank=0, seq=0, time_ns=5, step=3, duration_s=0.25),
    Stacks(rank=0, seq=-1, time_ns=6, source="py-spy", error="none"),
    Exited(rank=0, seq=-1, time_ns=7, step=3, status=-9),
)


@dataclass(frozen=True)
class Row:
    read: Callable[[Path], object]
    errors: tuple[type[BaseException], ...]
    document: object = None
    """Plain values that are written as JSON, or ..."""
    data: bytes = b""
    spell: Callable[[object], bytes] = field(default=lambda value: spelled(value))
    name: str = "file"
    room: int = BYTES_AT_LEAST


def spelled(value):
    return json.dumps(value).encode("utf-8", "surrogatepass")


def render(path):
    report = read_report(path)
    for name in ("terminal", "github", "junit", "markdown", "sarif", "json"):
        load_reporter(name)(verbose=True).render(report).encode()


def decode_all(path):
    decoder = EventDecoder(0, Interner())
    for payload in EventReader(path.parent, 0).payloads():
        try:
            event = decoder.decode(payload)
        except DamagedFileError:
            continue
        assert event is None or encode(event)


def segment(folder):
    writer = EventWriter(folder, 0, on_forget=lambda: None, segment_bytes=4096)
    for event in EVENTS * 3:
        writer.append(encode(event))
    (path,) = folder.glob("*.events")
    return path


def journal(folder):
    written = Journal(folder / "journal")
    for event in EVENTS:
        written.write(event)
    return folder / "journal"


def status(folder):
    StatusPage(folder / "status").beat(3, 4)
    return folder / "status"


def toml(document):
    """Spell tables of values, in the order in which TOML wants them: inner tables come last."""
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    lines = [f"{json.dumps(k)} = {_inline(v)}" for k, v in document.items() if k not in tables]
    for key, table in tables.items():
        lines.append(f"[{json.dumps(key)}]")
        lines += [f"{json.dumps(k)} = {_inline(v)}" for k, v in table.items()]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _inline(value):
    match value:
        case dict():
            return (
                "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
            )
        case list():
            return f"[{', '.join(map(_inline, value))}]"
        case float():
            return str(value)
        case _:
            return json.dumps(value)


RECORDER = {
    "version": "2.5",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": 2, "last_completed_collective": 1}},
    "entries": [
        {
            "frames": [{"name": "main", "filename": "train.py", "line": 3}],
            "record_id": n,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": n + 1,
            "p2p_seq_id": 0,
            "op_id": n + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 5 + n,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": "scheduled",
            "is_p2p": False,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": 600000,
        }
        for n in range(2)
    ],
}
RAS = answer(([rank(0, 10), rank(1, 11, AllReduce=3)], [missing(2, 12, dead=True)]))
TRACE = {
    "traceEvents": [{"ph": "X", "name": "op", "pid": 1, "tid": 2, "ts": 1.5, "dur": 2, "id": 3}],
    "baseTimeNanoseconds": 7,
    "distributedInfo": {"rank": 1, "world_size": 2},
}
SUMMARY = {
    "rank": 0,
    "world_size": 2,
    "num_steps": 3,
    "num_batches": 3,
    "devices": ["cpu"],
    "optimizer_sites": {"a": msgspec.to_builtins(Frame("a.py", 1, "f"))},
}
LIVE = LiveRank(job="a", rank=0, local_rank=0, world_size=2, hostname="node", pid=5)
THREAD = ThreadStack("MainThread", (Frame("train.py", 41, "evaluate"),))
NODE = json.loads(
    NodeDump(hostname="node", ranks=(RankStacks(who=LIVE, threads=(THREAD,)),)).to_json()
)
CONFIG = {
    "hang_timeout": 30,
    "report": ["html"],
    "select": ["COL"],
    "fail_on": "warning",
    "plan": {"layers.*": "Replicate over *"},
    "ignore": [{"codes": ["COL001"], "reason": "r"}],
    "baseline": "x.json",
    "strict": True,
}
DAMAGED = (DamagedFileError, UsageError)
REPORT = json.loads(encode_report(make_report(make_finding(), make_note())))
BASELINE = json.loads(encode_baseline(baseline_of([make_finding()], tool_version="1")))


def flight(path):
    return list(FlightRecorder().read(Dump(path="trace_0", data=path.read_bytes())))


def trace(path):
    return list(ProfilerTrace(path, {0: 1}).events(3))


def frames(path):
    return list(FrameReader().feed(path.read_bytes()))


ROWS = {
    "a report, in all forms": Row(render, DAMAGED, REPORT),
    "a report to compare": Row(facts_of, DAMAGED, REPORT, name="report.json"),
    "a capture to compare": Row(
        facts_of, DAMAGED, {"environment": {"variable A": "b", "version torch": "2"}}
    ),
    "a baseline": Row(read_baseline, (UsageError,), BASELINE),
    "a configuration": Row(
        lambda path: load_config({"config": path}), (UsageError,), CONFIG, spell=toml
    ),
    "the address of the reporter": Row(
        lambda path: read_reporter_address(RunDir(path.parent.parent, 0)),
        (DamagedFileError,),
        msgspec.to_builtins(ReporterAddress(host="h", port=1, token="t")),
        name="attempt-0/reporter.json",
    ),
    "the summary of a rank": Row(
        lambda path: read_summary(path.read_bytes()), UNDECODABLE, SUMMARY
    ),
    "the stacks of a node": Row(
        lambda path: read_node_dump(path.read_bytes()),
        (DamagedFileError,),
        NODE,
        spell=lambda value: json.dumps(value, separators=(",", ":")).encode(),
    ),
    "a flight recorder in JSON": Row(flight, (DamagedFileError,), RECORDER),
    "a flight recorder in a pickle": Row(  # which may name a far place of its memo
        flight,
        (DamagedFileError,),
        RECORDER,
        spell=lambda value: pickle.dumps(value, 2),
        room=LEAST_ROOM,
    ),
    "a trace of the profiler": Row(trace, DAMAGED, TRACE, name="rank1.json"),
    "a packed trace of the profiler": Row(
        trace, DAMAGED, data=gzip.compress(spelled(TRACE), mtime=0), name="rank1.json.gz"
    ),
    "an answer of NCCL in JSON": Row(lambda path: parse_json(path.read_bytes()), UNDECODABLE, RAS),
    "an answer of NCCL as text": Row(
        lambda path: parse_text(path.read_text(errors="replace")), (), data=spelled(RAS)
    ),
    "what was carried": Row(
        lambda path: list(unpack(0, path.read_bytes(), Interner())),
        (DamagedFileError,),
        data=pack(EVENTS),
    ),
    "frames": Row(frames, (LinkError,), data=b"".join(map(to_bytes, FRAMES))),
}
FILES = {
    "an event file": (segment, decode_all, (DamagedFileError,)),
    "a journal": (journal, lambda path: list(read_journal(path, Interner())), (DamagedFileError,)),
    "a status page": (status, read_status, (DamagedFileError, FileNotFoundError)),
}


def read_changed(row, path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        row.read(path)
    except row.errors as error:
        assert len(str(error)) < 4000 + 8 * len(content)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < row.room + BYTES_FOR_EACH * len(content)


def fuzz(name, path, times):
    row = ROWS[name]
    good = row.data or row.spell(row.document)
    for seed in range(times):
        rng = seeded(name, seed)
        if row.document is not None and seed % 3:
            try:
                content = row.spell(changed_document(row.document, rng))
            except (ValueError, OverflowError):
                continue  # this form has no way to say it
        else:
            content = changed_bytes(good, rng)
        read_changed(row, path / row.name, content)


def fuzz_file(name, path, times):
    make, read, errors = FILES[name]
    made = make(path)
    good = made.read_bytes()
    for seed in range(times):
        read_changed(Row(read, errors), made, changed_bytes(good, seeded(name, seed)))


@pytest.mark.parametrize("name", ROWS)
def test_a_good_example_is_read(name, tmp_path):
    row = ROWS[name]
    path = tmp_path / row.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(row.data or row.spell(row.document))
    row.read(path)


@pytest.mark.parametrize("name", ROWS)
def test_a_changed_one_is_read_or_is_a_documented_error(name, tmp_path):
    fuzz(name, tmp_path, SHORT)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_of_a_run_is_read_or_is_a_documented_error(name, tmp_path):
    fuzz_file(name, tmp_path, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROWS)
def test_many_changed_ones(name, tmp_path):
    fuzz(name, tmp_path, LONG)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILES)
def test_many_changed_files_of_a_run(name, tmp_path):
    fuzz_file(name, tmp_path, LONG)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a report, in all forms", spelled(REPORT | {"fail_on": "err\x7fr"})),
        ("a trace of the profiler", spelled(TRACE | {"traceEvents": [{"pid": {}}]})),
        ("a trace of the profiler", spelled({"traceEvents": [{"pid": {}}]})),
        ("a trace of the profiler", spelled(TRACE | {"traceEvents": [{"ts": 10**400}]})),
        ("a packed trace of the profiler", gzip.compress(spelled(TRACE))[:12] + b"\xff" * 40),
        ("a configuration", b"hang_timeout = " + b"9" * 5000),
    ],
    ids=["fail_on", "pid", "no time unit", "large time", "damaged archive", "long number"],
)
def test_what_was_a_crash_before(name, content, tmp_path):
    read_changed(ROWS[name], tmp_path / ROWS[name].name, content)
