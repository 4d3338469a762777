"""A job that torchrun started and that failed, read from what it left."""

import subprocess
import sys
import tarfile

import pytest

from distdiag.dumps.files import Refused, walk
from distdiag.dumps.ranks import resolve_ranks
from distdiag.dumps.reading import load_readers
from distdiag.events.lifecycle import Exited, Raised
from distdiag.events.stacks import Stacks

SCRIPT = """
import faulthandler, os, time
faulthandler.enable()
def step():
    if os.environ["RANK"] == "1":
        raise ValueError("empty batch")
    faulthandler.dump_traceback()
    time.sleep(100)
step()
"""


def analyzed(*paths):
    """Return the events of all dumps by rank, and all problems."""
    problems, found = [], []
    for dump in walk(paths):
        if isinstance(dump, Refused):
            problems.append(str(dump))
            continue
        for reader in load_readers():
            if reader.recognises(dump):
                found += reader.read(dump)
    resolved = resolve_ranks(found)
    by_rank = {}
    for rank_dump in resolved.dumps:
        by_rank.setdefault(rank_dump.rank, []).extend(rank_dump.events)
    return by_rank, [*problems, *resolved.problems]


def only(events, kind):
    (event,) = (event for event in events if isinstance(event, kind))
    return event


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    logs = ["--log-dir=logs", "--redirects=3"]
    done = subprocess.run(
        [*launcher, *rendezvous, *logs, "train.py"],
        cwd=folder,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    (folder / "console.log").write_bytes(done.stderr)
    return folder


def test_the_ranks_of_a_folder_are_known_from_the_names_of_its_logs(job):
    by_rank, problems = analyzed(job)
    assert problems == []
    raised = only(by_rank[1], Raised)
    assert (raised.type, raised.message) == ("ValueError", "empty batch")
    assert [(f.line, f.function, f.user) for f in raised.frames] == [
        (6, "step", True),
        (9, "<module>", True),
    ]
    assert only(by_rank[1], Exited).reason == "exit code 1"
    assert only(by_rank[0], Stacks).threads[0].frames[0].function == "step"
    assert only(by_rank[0], Exited).reason == "killed by SIGTERM from its launcher"
    assert set(by_rank) == {0, 1}


def test_an_archive_of_the_folder_says_the_same(job, tmp_path):
    with tarfile.open(tmp_path / "job.tar.gz", "w:gz") as archive:
        archive.add(job, arcname="job")
    assert analyzed(tmp_path) == analyzed(job)
