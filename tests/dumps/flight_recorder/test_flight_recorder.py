"""Dumps of the flight recorder: real ones of gloo, made-up ones of NCCL, and damaged ones."""

import json
import pickle

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.dumps.flight_recorder.reader import FlightRecorder as Reader
from distdiag.dumps.flight_recorder.recording import COMPLETED, PENDING, RETIRED, Tables
from distdiag.dumps.reading import Dump
from distdiag.events.errors import DamagedFileError
from tests.dumps import recorders
from tests.dumps.reading import read
from tests.dumps.real_recorders import PROGRAM, dump_two_ranks


@pytest.fixture(scope="module")
def gloo_dumps(tmp_path_factory):
    """The folder of the dumps of two real ranks."""
    return dump_two_ranks(tmp_path_factory.mktemp("gloo"))


def dump_of(data, path="trace_0"):
    return Dump(path=path, data=data)


def recording_of(data):
    (dump,) = read(Reader(), dump_of(data))
    assert (dump.rank, dump.events, dump.source) == (None, (), "flight-recorder")
    return dump.recording


def calls_of(recording):
    """Return (group, op, sizes, seq_id, state) of each call, in order."""
    tables = msgspec.msgpack.decode(recording.tables, type=Tables)
    rows = recording.columns.rows()
    signatures = [(row, tables.calls[row[1]].signature) for row in rows]
    return [
        (recording.groups[row[0]].desc, signature.op, signature.input_sizes, row[2], row[3])
        for row, signature in signatures
    ]


@pytest.mark.parametrize("name", ["trace_0", "trace_0.json"])
def test_a_dump_of_gloo_is_read(gloo_dumps, name):
    recording = recording_of((gloo_dumps / name).read_bytes())
    calls = calls_of(recording)
    assert [call[:4] for call in calls] == [
        ("default_pg", "all_reduce", ((4,),), 1),
        ("default_pg", "all_reduce", ((4,),), 2),
        ("default_pg", "all_reduce", ((4,),), 3),
        ("mine", "all_gather_into_tensor", ((2,),), 1),
        ("default_pg", "barrier", (), 4),
        ("default_pg", "all_reduce", ((5,),), 5),
    ]
    assert [state for *_, state in calls][-1] == PENDING
    assert calls[0][4] == RETIRED
    assert {group.backend for group in recording.groups} == {"gloo"}
    assert recording.has_stacks is (name == "trace_0")


def test_the_stack_of_a_call_ends_at_the_users_line(gloo_dumps):
    recording = recording_of((gloo_dumps / "trace_0").read_bytes())
    tables = msgspec.msgpack.decode(recording.tables, type=Tables)
    site = tables.site(tables.calls[0])
    line = PROGRAM.splitlines().index("    dist.all_reduce(torch.ones(4))") + 1
    assert (site.location.file, site.location.line, site.location.function) == (
        str(gloo_dumps / "train.py"),
        line,
        "train",
    )
    assert tables.calls[0].api == "all_reduce"


OLDER = {
    "2.0": {"pg_id", "thread_id", "thread_name", "input_dtypes", "output_dtypes", "timeout_ms"},
    "2.1": {"thread_id", "thread_name", "input_dtypes", "output_dtypes"},
    "2.2": {"thread_id", "thread_name"},
    "2.3": {"thread_id", "thread_name"},
    "2.4": {"thread_id", "thread_name"},
    "2.5": {"is_p2p"},
    "2.6": set(),
    "2.7": set(),
    "2.8": {"retired"},
    "2.9": set(),
    "2.10": set(),
}


@pytest.mark.parametrize("version", OLDER)
@pytest.mark.parametrize("form", ["pickle", "json"])
def test_every_version_is_read(version, form):
    recorder = recorders.FlightRecorder(0, 2, version=version)
    recorder.call("_all_gather_base", [(4,)], [(8,)])
    recorder.call().update(state="started", retired=False)
    for entry in recorder.entries:
        for field in OLDER[version]:
            del entry[field]
    recording = recording_of(getattr(recorder, form)())
    assert recording.version == version
    assert calls_of(recording) == [
        ("default_pg", "all_gather_into_tensor", ((4,),), 1, COMPLETED),
        ("default_pg", "all_reduce", ((4,),), 2, PENDING),
    ]
    assert recording.groups[0].ranks == "[0, 1]"


def test_a_recorder_without_entries_is_read():
    recording = recording_of(b'{"version": "2.10", "pg_config": {}, "pg_status": {}}')
    assert calls_of(recording) == []


def hostile(**entry):
    recorder = recorders.FlightRecorder(0, 2)
    recorder.call(**entry)
    return recorder.pickle()


def shared(depth):
    """Return a list that takes no room and is endless to walk."""
    inner = []
    for _ in range(depth):
        inner = [inner, inner]
    return inner


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (hostile()[:-200], "no whole pickle"),
        (hostile().replace(b"pg_config", b"\xff\xff\xff\xff" * 2 + b"g") + b"pg_config", "."),
        (b'{"version": "1.5", "pg_config": {}}', "format version is '1.5', and 2.x is known"),
        (b'{"version": 2, "pg_config": {}}', "format version is '2'"),
        (b'{"version": "2.10", "pg_config": {}, "entries": 3}', "entries are no list"),
        (b'{"version": "2.10", "pg_config": {}, "entries": [3]}', "entry 0 makes no sense"),
        (b'{"version": "2.10", "pg_config": {}, "entries": [{}]}', "it has no"),
        (b'{"pg_config": ' + b"[" * 200, "truncated"),
        (b'{"pg_config": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001, "recursion"),
        (pickle.dumps(["pg_config"]), "holds a list instead of fields"),
        (hostile(state="gone"), "its state is none of"),
        (hostile(frames=3), "its frames are no list"),
        (hostile(frames=[{"name": "f"}]), "missing required field"),
        (hostile(input_sizes=[[1] * 65]), "length <= 64"),
        (hostile(input_sizes=shared(200)), "Expected `int`, got `array`"),
        (hostile(input_sizes=[[2**70]]), "."),
        (hostile(record_id="x"), "."),
        (hostile(collective_seq_id=2**70), "."),
        (hostile(collective_seq_id=None), "."),
        (hostile(time_created_ns=[]), "."),
        (hostile(process_group=("a",)), "length 2"),
        (hostile(profiling_name=None), "Expected `str`"),
    ],
)
def test_a_damaged_or_hostile_dump_is_one_line(data, reason):
    with pytest.raises(DamagedFileError, match=reason) as caught:
        list(Reader().read(dump_of(data, "a/trace_0")))
    text = str(caught.value)
    assert text.startswith("a/trace_0: the flight-recorder dump cannot be read: ")
    assert "\n" not in text


def test_json_200_levels_deep_is_no_crash():
    deep = b"[" * 200 + b"]" * 200
    entries = b'{"version": "2.10", "pg_config": %s, "entries": []}' % deep
    assert calls_of(recording_of(entries)) == []


def test_a_dump_that_grows_when_it_is_walked_is_refused():
    sizes = [[7] * 64] * 65_000
    recorder = recorders.FlightRecorder(0, 2)
    for number in range(8):
        recorder.call(input_sizes=sizes, line=number)
    with pytest.raises(DamagedFileError, match="implausibly many sizes"):
        list(Reader().read(dump_of(recorder.pickle())))


@pytest.mark.parametrize("data", [b"", b"{}", b"pg_config", b"\x80\x02}.", b"[1, 2]"])
def test_other_files_are_not_recognised(data):
    assert not Reader().recognises(dump_of(data))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = sorted(recorders.FlightRecorder(0, 2).call())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(field=st.sampled_from([*FIELDS, "version", "pg_config", "entries"]), value=values)
def test_any_value_in_any_field_is_read_or_refused(field, value):
    recorder = recorders.FlightRecorder(0, 2)
    recorder.call()
    dump = recorder.dump()
    (dump if field in dump else dump["entries"][0])[field] = value
    for data in (pickle.dumps(dump, 2), json.dumps(dump, default=str).encode()):
        try:
            list(Reader().read(dump_of(data)))
        except DamagedFileError as error:
            assert str(error).startswith("trace_0: ")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_any_damage_to_the_bytes_is_read_or_refused(place, byte, cut):
    recorder = recorders.FlightRecorder(0, 2)
    recorder.call()
    recorder.call("_all_gather_base", [(4,)], [(8,)], line=12)
    for data in (recorder.pickle(), recorder.json()):
        damaged = bytearray(data)
        damaged[place % len(data)] = byte
        for changed in (bytes(damaged), data[: cut % len(data)]):
            try:
                list(Reader().read(dump_of(changed)))
            except DamagedFileError as error:
                assert str(error).startswith("trace_0: ")
