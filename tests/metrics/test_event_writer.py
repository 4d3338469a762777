"""Event files of TensorBoard that are made of a run: what was written is read again."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from click.testing import CliRunner

from distdiag.cli.report import command
from distdiag.events.errors import UsageError
from distdiag.events.lifecycle import RankStarted, StepEnd
from distdiag.events.logged import Logged
from distdiag.metrics import event_writer
from distdiag.metrics.event_writer import FILE_NAME, write_event_files
from distdiag.metrics.readers.event_files import masked_crc
from distdiag.metrics.readers.messages import NoProtobufError, message_class
from distdiag.metrics.reading import read
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import RunDir
from distdiag.record.status_page import StatusPage
from distdiag.reports import write_report
from tests.reports.samples import make_finding, make_report, make_run

WALL_NS = 1_700_000_000_000_000_000


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run of two ranks, whose losses differ, and one of which has NaN."""
    folder = tmp_path / "run"
    run_dir = RunDir(folder, 0)
    run_dir.folder.mkdir(parents=True)
    for rank in (0, 1):
        recorder = Recorder(run_dir.folder, rank, StatusPage(run_dir.status(rank)))
        recorder.event(
            RankStarted,
            local_rank=rank,
            world_size=2,
            hostname="a",
            pid=100 + rank,
            python="3",
            command=("train.py",),
            unix_ns=WALL_NS,
        )
        for step in range(3):
            loss = math.nan if (rank, step) == (1, 2) else rank + 0.5 * step
            recorder.event(Logged, logger="print", logged_step=step, values=(("loss", loss),))
            recorder.event(StepEnd, duration_s=0.25)
            recorder.step += 1
    return folder


def curves(folder, rank):
    found = read([folder / f"rank-{rank}" / FILE_NAME])
    assert found.problems == ()
    (of_file,) = found.curves
    return {
        name: list(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        for name, series in of_file.series.items()
    }


def events_of(path):
    """Return the messages of a file, each of whose checksums is right."""
    data, found = path.read_bytes(), []
    while data:
        length, checksum = struct.unpack("<QI", data[:12])
        content, end = data[12 : 12 + length], data[12 + length : 16 + length]
        assert masked_crc(data[:8]) == checksum
        assert struct.unpack("<I", end) == (masked_crc(content),)
        found.append(message_class("Event").FromString(content))
        data = data[16 + length :]
    return found


def test_each_rank_has_its_curves(run, tmp_path):
    report = make_report(run=msgspec.structs.replace(make_run(), started="2026-01-01T00:00:00Z"))
    assert write_event_files(report, run, tmp_path / "tb") == 2
    first, second = (curves(tmp_path / "tb", rank) for rank in (0, 1))
    assert first["logged: loss"] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert second["logged: loss"][:2] == [(0, 1.0), (1, 1.5)]
    assert math.isnan(second["logged: loss"][2][1])
    assert first["duration of a step (s)"] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    version, *events = events_of(tmp_path / "tb" / "rank-0" / FILE_NAME)
    assert version.file_version == "brain.Event:2"
    assert all(event.wall_time >= WALL_NS / 1e9 for event in events)


def test_findings_are_texts(run, tmp_path):
    write_event_files(make_report(make_finding(step=7)), run, tmp_path / "tb")
    _, event = events_of(tmp_path / "tb" / "findings" / FILE_NAME)
    (value,) = event.summary.value
    assert (event.step, value.tag) == (7, "COL003 collective-shape-mismatch")
    assert value.metadata.plugin_data.plugin_name == "text"
    assert b"**Symptom.** all_gather" in value.tensor.string_val[0]


def test_the_command_names_a_folder(run, tmp_path):
    write_report(run / "report.json", make_report(make_finding()))
    given = [str(run), "--format", "tensorboard"]
    assert isinstance(CliRunner().invoke(command, given).exception, UsageError)
    done = CliRunner().invoke(command, [*given, "-o", str(tmp_path / "tb")])
    assert (done.stdout, done.stderr) == (
        "",
        f"distdiag: 3 event files below {tmp_path / 'tb'}\n",
    )


def test_without_protobuf_it_says_what_to_install(run, tmp_path, monkeypatch):
    def absent(_):
        raise NoProtobufError

    monkeypatch.setattr(event_writer, "message_class", absent)
    with pytest.raises(UsageError, match=r"pip install 'distdiag\[metrics\]'"):
        write_event_files(make_report(), run, tmp_path / "tb")


def test_a_folder_that_cannot_be_written_is_said_to_be(run, tmp_path):
    (tmp_path / "tb").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_event_files(make_report(), run, tmp_path / "tb")
