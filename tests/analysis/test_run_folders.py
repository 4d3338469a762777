"""Run directories after the end: whole, damaged, and those of two nodes of one run."""

import shutil
import signal
from contextlib import contextmanager

import msgspec
import pytest

from distdiag.analysis import analyze
from distdiag.analysis.run_folders import find_run_folders, is_run_folder
from distdiag.events.errors import UsageError
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome, Severity
from distdiag.record.wire import Interner
from tests.fake_ranks import FakeJob

READY = "open(rank.run_dir.root / f'ready-{rank.rank}', 'w').close()\n"
WAIT = READY + "time.sleep(600)\n"


@contextmanager
def job(root, bodies):
    """Ranks without a monitor that came as far as their bodies say and were then killed."""
    ranks = FakeJob(root, bodies)
    ranks._write_launch_file()
    ranks.ranks = [
        ranks._start_rank(rank, body) for rank, body in enumerate(bodies) if body is not None
    ]
    try:
        for rank, body in enumerate(bodies):
            if body is not None:
                ranks.until(lambda rank=rank: (root / f"ready-{rank}").exists(), timeout_s=60)
    finally:
        for process in ranks.ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    yield ranks


def found(report):
    return {(f.code, str(f.ranks)) for f in report.findings if f.severity is not Severity.INFO}


def test_a_rank_that_left_is_found_after_the_end(tmp_path):
    ended = "rank.all_reduce()\nrank.recorder.event(Finished, exit_status=0)\n"
    first = "rank.all_reduce()\nrank.all_reduce(line=20, done=False)\n" + WAIT
    body = "from distdiag.events.lifecycle import Finished\n" + ended + READY + "time.sleep(600)\n"
    with job(tmp_path / "run", [first, body]):
        report = analyze([tmp_path])
    assert ("COL001", "1") in found(report)
    assert report.run.id == "run"
    assert report.run.torch == "2.13.0"
    assert [rank.hostname for rank in report.run.ranks] == ["here", "here"]


def test_a_contradiction_is_found_after_the_end(tmp_path):
    bodies = [f"rank.all_reduce({size}, done=False)\n" + WAIT for size in (4, 4, 5)]
    with job(tmp_path / "run", bodies):
        report = analyze([tmp_path / "run"])
    assert ("COL003", "2") in found(report)
    assert report.run.outcome is Outcome.KILLED


def test_two_folders_of_two_nodes_are_one_run(tmp_path):
    bodies = [f"rank.all_reduce({size}, done=False)\n" + WAIT for size in (4, 5)]
    first, second = tmp_path / "node-0", tmp_path / "node-1"
    with job(first, [bodies[0], None]), job(second, [None, bodies[1]]):
        report = analyze([first, second])
    assert ("COL003", "0-1") in found(report)
    assert report.silent_ranks == RankSet()
    alone = analyze([first])
    assert "COL003" not in {code for code, _ in found(alone)}
    assert alone.silent_ranks == RankSet([1])


@pytest.mark.parametrize("damage", ["cut", "overwritten", "no status page"])
def test_a_damaged_rank_is_said_and_the_rest_is_judged(tmp_path, damage):
    bodies = [f"rank.all_reduce({size}, done=False)\n" + WAIT for size in (4, 5, 4, 4)]
    with job(tmp_path / "run", bodies) as ranks:
        events = next(ranks.run_dir.folder.glob("rank-3.*.events"))
        if damage == "cut":
            events.write_bytes(events.read_bytes()[:40])
        elif damage == "overwritten":
            events.write_bytes(b"\xff" * 4096)
        else:
            ranks.run_dir.status(3).unlink()
        report = analyze([tmp_path])
    assert {rank.rank for rank in report.run.ranks} == {0, 1, 2, 3}
    assert report.run.world_size == 4
    if damage == "overwritten":
        assert "is not an event file" in report.not_checked["rank 3"]
    if damage == "no status page":
        assert ("COL003", "1") in found(report)


def test_run_folders_are_found_below_a_folder_once(tmp_path):
    with job(tmp_path / "a" / "run", ["rank.all_reduce()\n" + WAIT]):
        pass
    (folder,) = find_run_folders([tmp_path, tmp_path / "a", tmp_path / "a" / "run"])
    assert (folder.run_dir.root, folder.ranks) == (tmp_path / "a" / "run", [0])
    assert is_run_folder(tmp_path / "a" / "run")
    assert not is_run_folder(tmp_path / "a")


def test_of_several_runs_below_a_folder_the_newest_is_taken(tmp_path):
    with job(tmp_path / "a", ["rank.all_reduce()\n" + WAIT]):
        pass
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    launch = tmp_path / "b" / "attempt-0" / "launch.json"
    file = msgspec.json.decode(launch.read_bytes())
    file["launch"]["started_s"] += 60
    launch.write_bytes(msgspec.json.encode(file))
    report = analyze([tmp_path])
    assert report.run.id == "b"
    assert report.not_checked[f"{tmp_path}/a"] == "not used: an older run; name it to read it"
    assert analyze([tmp_path / "a"]).run.id == "a"
    with pytest.raises(UsageError, match="both hold rank 0; analyze one run at a time"):
        analyze([tmp_path / "a", tmp_path / "b"])


def test_two_runs_are_not_mixed(tmp_path):
    with job(tmp_path / "a", ["rank.all_reduce()\n" + WAIT]):
        pass
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match="both hold rank 0; analyze one run at a time"):
        analyze([tmp_path])


def test_an_end_that_a_monitor_noted_comes_after_what_the_rank_wrote_while_it_looked(tmp_path):
    said = "from distdiag.events.lifecycle import Finished\nrank.all_reduce()\n"
    before = "import time\nlooked_ns = time.monotonic_ns()\n"
    written = "rank.recorder.event(Finished, exit_status=1)\n"
    note = (
        "from distdiag.events.lifecycle import Exited\n"
        "from distdiag.transports.journal import Journal\n"
        "Journal(rank.run_dir.journal).write(Exited(rank=0, seq=-1, time_ns=looked_ns, status=1,"
        " gone_ns=time.monotonic_ns()))\n"
    )
    with job(tmp_path / "run", [said + before + written + note + WAIT]):
        pass
    (folder,) = find_run_folders([tmp_path])
    kinds = [type(event).__name__ for _, event in folder.timed_events(Interner())]
    assert kinds[-2:] == ["Finished", "Exited"]
