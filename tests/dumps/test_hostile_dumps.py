"""No file breaks a reader: it finds something, finds nothing, or says that the file is damaged."""

import os
import sys
from itertools import cycle, islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distdiag.dumps.launchers.torchelastic_json import TorchelasticJson
from distdiag.dumps.launchers.torchelastic_text import TorchelasticText
from distdiag.dumps.logs.nccl_log import NcclLog
from distdiag.dumps.logs.traceback_text import TracebackText
from distdiag.dumps.ranks import resolve_ranks
from distdiag.dumps.reading import Dump
from distdiag.dumps.stacks.faulthandler_text import FaulthandlerText
from distdiag.dumps.stacks.native_text import NativeText
from distdiag.dumps.stacks.py_spy_json import PySpyJson
from distdiag.dumps.stacks.py_spy_text import PySpyText
from distdiag.events.errors import DamagedFileError
from distdiag.record.wire import EventDecoder, Interner, encode
from tests.dumps.reading import SAMPLES

READERS = (
    FaulthandlerText(),
    NativeText(),
    NcclLog(),
    PySpyJson(),
    PySpyText(),
    TorchelasticJson(),
    TorchelasticText(),
    TracebackText(),
)
CONTENTS = [path.read_bytes() for path in sorted(SAMPLES.iterdir())]
LINES = sorted({line for data in CONTENTS for line in data.splitlines(keepends=True)})
EXTRA = [b"[rank1]: ", b"[default2]:", b"\r", b"\0", b"\x1b[", b"\xff\xfe", b"9" * 30, b"(" * 50]
EXTRA += ["\u0663".encode(), "\u00b2".encode(), b'"', b"\\", b":", b"<", b"#1 ", b" - "]

settings.register_profile(
    "hostile", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150
)
hostile = settings.get_profile("hostile")


def check(data):
    """Let every reader read, whether it recognises the file or not."""
    dump = Dump(path="a/rank_1.txt", data=data)
    found = []
    for reader in READERS:
        reader.recognises(dump)
        try:
            found += reader.read(dump)
        except DamagedFileError as error:
            assert str(error).startswith("a/rank_1.txt: ")
            assert "\n" not in str(error)
    for rank_dump in resolve_ranks(found).dumps:
        for event in rank_dump.events:
            assert event.rank == rank_dump.rank >= 0
            assert EventDecoder(event.rank, Interner()).decode(encode(event)) == event
    return found


@hostile
@given(st.binary(max_size=2000))
def test_noise(data):
    check(data)


@hostile
@given(st.lists(st.sampled_from(LINES + EXTRA), max_size=60))
def test_lines_of_all_formats_in_any_order(lines):
    check(b"".join(lines))


@hostile
@given(st.sampled_from(CONTENTS), st.data())
def test_files_that_were_cut_and_changed(content, data):
    changed = bytearray(content[: data.draw(st.integers(0, len(content)))])
    for place in data.draw(st.lists(st.integers(0, len(content)), max_size=10)):
        insert = data.draw(st.one_of(st.sampled_from(EXTRA), st.binary(max_size=4)))
        changed[place : place + data.draw(st.integers(0, 5))] = insert
    check(bytes(changed))


@pytest.mark.parametrize(
    "pattern",
    [
        b"x",
        b"\0",
        b"\x1b[",
        b"\x1b]",
        b"(",
        b"<",
        b"[rank1]:",
        b"[rank1]: [rank2]: ",
        b"[PG ID 0 PG GUID 0(",
        b"#0  0x1 ",
        b' File "',
        b"Traceback (most recent call last):",
        b"Timed out waiting NCCL watchdog by peer gloo ",
        b"Thread 1 (idle): ",
        b'  File "a", line 1 in ',
        b"Received a dump signal due to a collective timeout from  this local rank ",
    ],
)
@pytest.mark.parametrize(
    ("end", "size"), [(b"", 1 << 18), (b"\n", 1 << 15)], ids=["one line", "many lines"]
)
def test_repetition_takes_no_endless_time(pattern, end, size):
    check(bytes(islice(cycle(pattern + end), size)))


def test_reading_opens_and_starts_nothing():
    happened = []
    watching = True

    def hook(event, arguments):
        if watching and event.split(".")[0] in ("open", "os", "subprocess", "socket", "exec"):
            happened.append((event, arguments))

    sys.addaudithook(hook)
    for content in CONTENTS:
        check(content)
    os.getcwd()  # no audit event: what is watched for stays what it is
    watching = False
    assert happened == []
