"""report.json: whole at every moment, private, and written even when the disk is full."""

import errno
import os
import stat

import pytest

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Outcome, Report, Run
from distdiag.findings.report_json import decode_report
from distdiag.reports import load_reporter, read_report, write_report


def report(**changes):
    run = Run(
        id="r1",
        command=("train.py",),
        world_size=0,
        ranks=(),
        torch="2.13.0",
        started="2026-01-01T00:00:00Z",
        ended=None,
        outcome=Outcome.RUNNING,
    )
    return Report(run=run, **changes)


def test_the_file_is_private_and_holds_the_report(tmp_path):
    path = tmp_path / "report.json"
    write_report(path, report())
    assert decode_report(path.read_bytes()) == report()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == load_reporter("json")().render(report())


def test_a_newer_report_replaces_the_older_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "report.json"
    write_report(path, report(complete=False))
    write_report(path, report(complete=True))
    assert decode_report(path.read_bytes()).complete
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_reader_that_has_the_file_open_keeps_a_whole_report(tmp_path):
    path = tmp_path / "report.json"
    write_report(path, report(checked=("COL001",)))
    with path.open("rb") as reader:
        write_report(path, report())
        assert decode_report(reader.read()).checked == ("COL001",)


def test_what_a_killed_writer_left_behind_is_no_obstacle(tmp_path):
    (tmp_path / f".report.json.{os.getpid()}").write_text("half")
    write_report(tmp_path / "report.json", report())
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_directory_that_is_gone_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "gone" / "report.json", report())


def full_until_gone(reserve):
    """Return an os.replace that finds the disk full as long as the file `reserve` is there."""
    replace = os.replace

    def stand_in(source, target):
        if reserve.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    return stand_in


def test_a_full_disk_costs_the_reserve_and_not_the_report(tmp_path, monkeypatch):
    reserve = tmp_path / "reserve"
    reserve.write_bytes(b"0" * 4096)
    monkeypatch.setattr(os, "replace", full_until_gone(reserve))
    write_report(tmp_path / "report.json", report(), reserve=reserve)
    assert os.listdir(tmp_path) == ["report.json"]


def test_without_a_reserve_a_full_disk_leaves_the_older_report_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_report(path, report(checked=("COL001",)))
    reserve = tmp_path / "reserve"
    reserve.touch()
    monkeypatch.setattr(os, "replace", full_until_gone(reserve))
    with pytest.raises(OSError, match="No space left"):
        write_report(path, report())
    assert decode_report(path.read_bytes()).checked == ("COL001",)
    assert sorted(os.listdir(tmp_path)) == ["report.json", "reserve"]


def test_a_path_that_is_no_text_does_not_cost_the_report(tmp_path):
    path = tmp_path / "report.json"
    write_report(path, report(not_checked={"COL001": "caf\udce9.py cannot be read"}))
    assert "caf\\udce9.py" in read_report(path).not_checked["COL001"]


def test_a_report_is_read_from_its_file_or_its_run_directory(tmp_path):
    write_report(tmp_path / "report.json", report())
    assert read_report(tmp_path) == read_report(tmp_path / "report.json") == report()


def test_a_report_that_is_not_there_is_a_mistake_of_usage(tmp_path):
    with pytest.raises(UsageError, match=r"report\.json: cannot be read: No such file"):
        read_report(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b'{"schema_version": 1}',
        b"[" * 100_000,
        b'{"x": ' + b"[" * 100_000,
        b'{"silent_ranks": ["a"]}',
        b'{"silent_ranks": "all"}',
    ],
)
def test_a_damaged_report_is_named(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_bytes(text)
    with pytest.raises(DamagedFileError, match=rf"^{path}: "):
        read_report(path)


@pytest.mark.parametrize("ranks", ['["a"]', '"abc"', "[1.5]", "[null]", "{}"])
def test_ranks_that_are_no_numbers_are_damage(tmp_path, ranks):
    path = tmp_path / "report.json"
    write_report(path, report())
    text = path.read_text().replace('"silent_ranks": []', f'"silent_ranks": {ranks}')
    assert ranks in text
    path.write_text(text)
    with pytest.raises(DamagedFileError):
        read_report(path)
