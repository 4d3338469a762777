"""Run directories in which somebody has put something else in the place of a file."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from distdiag.analysis import analyze
from distdiag.analysis.evidence import gather
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.report_json import encode_report
from distdiag.record.run_dir import MOST_RANKS
from distdiag.reports import read_report
from tests.fake_ranks import FakeJob

FILES = (
    "attempt-0/launch.json",
    "attempt-0/monitor.journal",
    "attempt-0/rank-1.000000.events",
    "attempt-0/rank-1.status",
)
NUM_CHANGES = 60
"""For each file; 400 changes of all files together found one defect when this test was written."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of a run that has ended well."""
    root = tmp_path_factory.mktemp("whole") / "run"
    with FakeJob(root, ["rank.all_reduce()\nrank.finish()\n"] * 2) as job:
        job.wait()
    return root


@pytest.fixture
def run(whole, tmp_path):
    """Return a copy of it that may be spoilt."""
    return shutil.copytree(whole, tmp_path / "run")


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder(path):
    path.mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [pipe, device, sparse, folder])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_waited_for_by_nobody(run, name, make):
    (run / name).unlink()
    make(run / name)
    assert analyze([run]).run.world_size == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [pipe, device, sparse])
def test_a_report_that_is_no_file_is_one_clear_error(run, make):
    (run / "report.json").unlink()
    make(run / "report.json")
    with pytest.raises(UsageError, match=r"report.json: cannot be read: (not a|larger than)"):
        read_report(run)


@pytest.mark.timeout(60)
def test_nobody_counts_to_a_number_of_ranks_that_cannot_be(run):
    path = run / "attempt-0" / "launch.json"
    path.write_text(
        re.sub(r'"world_size":\s*2', f'"world_size":{MOST_RANKS + 1}', path.read_text())
    )
    assert analyze([run]).run.world_size == 2


def quoted(report, text):
    return text in encode_report(report).decode()


def test_a_line_of_a_file_that_a_dump_names_is_quoted_from_below_the_current_folder_only(
    tmp_path, monkeypatch
):
    source = tmp_path / "elsewhere" / "settings.py"
    source.parent.mkdir()
    source.write_text("def main():\n    secret = 'of mine'\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link.py").symlink_to(source)
    log = tmp_path / "rank_0.log"
    for named in (source, tmp_path / "here" / "link.py"):
        log.write_text(
            f'Traceback (most recent call last):\n  File "{named}", line 2, in main\n'
            "RuntimeError: no\n"
        )
        monkeypatch.chdir(tmp_path / "here")
        assert not quoted(analyze([log]), "of mine")
        monkeypatch.chdir(tmp_path)
        assert quoted(analyze([log]), "of mine")


@pytest.mark.parametrize(
    ("cwd", "command", "named"),
    [
        ("{folder}/project", ["train.py"], {"project"}),
        ("{folder}/project", ["-m", "x"], {"project"}),
        ("{folder}/project", ["{folder}/scripts/train.py"], {"project", "scripts"}),
        ("/", ["train.py"], set()),
        ("{folder}/home", ["{folder}/home/.config/x.py"], {"home/.config"}),
        ("{folder}/home/..", ["train.py"], set()),
        ("\0", ["\0.py"], set()),
    ],
)
def test_a_run_names_the_folders_of_its_source(run, monkeypatch, cwd, command, named):
    folder = run.parent
    monkeypatch.setenv("HOME", str(folder / "home"))
    path = run / "attempt-0" / "launch.json"
    launch = json.loads(path.read_text())
    launch |= {"cwd": cwd.format(folder=folder)}
    launch |= {"command": [word.format(folder=folder) for word in command]}
    path.write_text(json.dumps(launch))
    evidence = gather([run], {}, lambda _: None, None)
    expected = {Path.cwd(), *(folder / each for each in named)}
    assert set(evidence.source_folders) == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FILES)
def test_changed_bytes_end_in_a_report_or_in_one_clear_error(run, name):
    rng = random.Random(name)
    path = run / name
    good = path.read_bytes()
    used = len(good.rstrip(b"\0"))
    for _ in range(NUM_CHANGES):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4, 16))):
            data[rng.randrange(used)] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(used)))])
        try:
            analyze([run])
        except (DamagedFileError, UsageError) as error:
            assert "\n" not in str(error)
