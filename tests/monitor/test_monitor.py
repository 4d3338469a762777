"""The monitor beside real processes: what it reports, when it ends, that it never gets stuck."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from distdiag.findings.finding import Outcome
from distdiag.record.event_file import START, segment_path
from tests.fake_ranks import FakeJob

FINISH = "rank.all_reduce(); rank.finish()\n"
TRAIN_FOR_EVER = "rank.all_reduce(); rank.all_reduce(done=False)\nwhile True: time.sleep(0.1)\n"
ALIVE = "while True: time.sleep(0.1)\n"


def codes(report):
    return {finding.code for finding in report.findings if finding.severity != "info"}


def both_wait(report):
    return all("#1" in info.last for info in report.run.ranks)


def statuses(report):
    return {info.rank: info.fate for info in report.run.ranks}


# Nobody can let the kernel run out of memory in a test: its count goes up whenever it is read.
SHORT_OF_MEMORY = """
import itertools, sys
from distdiag.monitor import local_ranks, monitor
local_ranks.count_oom_kills = itertools.count(3).__next__
sys.exit(monitor.main(sys.argv[1:]))
"""


def test_a_healthy_run_is_finished_silent_and_complete(tmp_path):
    with FakeJob(tmp_path / "run", [FINISH, FINISH]) as job:
        stderr = job.wait()
        assert [rank.wait(10) for rank in job.ranks] == [0, 0]
    report = job.report()
    assert report.complete
    assert report.run.outcome is Outcome.FINISHED
    assert codes(report) == set()
    assert statuses(report) == {0: "finished", 1: "finished"}
    assert "all_reduce #0 in default_pg at train.py:10 (waited)" in report.run.ranks[1].last
    assert report.run.torch == "2.13.0"
    assert job.verdict().exit_status == 0
    assert "nothing found" in stderr
    assert not list(tmp_path.glob("run/report.reserve"))


def test_what_the_scripts_exited_with_is_left_for_the_command_line(tmp_path):
    with FakeJob(tmp_path / "run", [FINISH, "rank.all_reduce(); rank.finish(3)\n"]) as job:
        job.wait()
    assert json.loads(job.run_dir.exit_status.read_bytes()) == {"0": 0, "1": 3}
    assert job.report().run.outcome is Outcome.FAILED


def test_contradicting_ranks_are_reported_at_once_while_the_run_goes_on(tmp_path):
    bodies = [f"rank.all_reduce({size}, done=False)\n{ALIVE}" for size in (4, 5)]
    with FakeJob(tmp_path / "run", bodies) as job:
        job.until_report(lambda report: "COL003" in codes(report))
        assert not job.report().complete
        assert job.report().run.outcome is Outcome.RUNNING
        for process in job.ranks:
            process.kill()
            process.wait()
        stderr = job.wait()
    assert stderr.startswith("distdiag: error COL003 collective-shape-mismatch train.py:10")
    assert job.report().complete
    assert job.verdict().exit_status == 1
    assert "COL003" in job.verdict().summary


@pytest.mark.parametrize(("code", "is_memory"), [(SHORT_OF_MEMORY, True), (None, False)])
def test_memory_is_blamed_for_a_kill_where_the_kernel_has_counted_one(tmp_path, code, is_memory):
    with FakeJob(tmp_path / "run", [TRAIN_FOR_EVER] * 2, monitor_code=code) as job:
        job.until_report(both_wait)
        job.ranks[1].kill()
        job.ranks[1].wait()
        job.until_report(lambda report: "HNG002" in codes(report))
        job.ranks[0].terminate()
        job.ranks[0].wait()
        job.wait()
    (finding,) = job.report().findings
    assert (finding.code, list(finding.ranks)) == ("HNG002", [1])
    assert "died by SIGKILL" in finding.message
    assert ("memory" in finding.fix) == is_memory
    assert job.report().run.outcome is Outcome.KILLED


def test_a_killed_rank_is_the_first_cause_and_its_peer_is_dumped(tmp_path):
    with FakeJob(tmp_path / "run", [TRAIN_FOR_EVER, TRAIN_FOR_EVER]) as job:
        job.until_report(both_wait)
        job.ranks[1].kill()
        job.ranks[1].wait()
        job.until_report(lambda report: "HNG002" in codes(report))
        job.ranks[0].kill()
        job.ranks[0].wait()
        job.wait()
    report = job.report()
    assert report.run.outcome is Outcome.KILLED
    (finding,) = [finding for finding in report.findings if finding.code == "HNG002"]
    assert list(finding.ranks) == [1]
    assert statuses(report) == {0: "died", 1: "died"}
    assert "all_reduce #1" in report.run.ranks[1].last


def test_a_rank_that_raised_waits_only_until_its_peers_are_dumped(tmp_path):
    raising = "rank.all_reduce(); time.sleep(0.5); rank.fail('no such batch', patience_s=3600)\n"
    with FakeJob(tmp_path / "run", [TRAIN_FOR_EVER, raising]) as job:
        assert job.ranks[1].wait(60) == 1
        job.ranks[0].kill()
        job.ranks[0].wait()
        job.wait()
    report = job.report()
    assert report.run.outcome is Outcome.FAILED
    assert "HNG001" in codes(report)
    assert "raised ValueError at train.py:20" in report.run.ranks[1].last
    assert "no such batch" in report.run.ranks[1].last


def test_a_death_comes_before_the_exception_that_it_causes(tmp_path):
    # Rank 0 raises within a millisecond of the death of rank 1, long before anybody can look.
    watching = (
        "import select\nrank.all_reduce()\n"
        "while not os.path.exists(sys.argv[1] + '/pid1'): time.sleep(0.01)\n"
        "fd = os.pidfd_open(int(open(sys.argv[1] + '/pid1').read()))\n"
        "rank.all_reduce(done=False); select.select([fd], [], [])\n"
        "rank.fail('Connection closed by peer', inside_torch=True)\n"
    )
    with FakeJob(tmp_path / "run", [watching, TRAIN_FOR_EVER]) as job:
        named = tmp_path / "run" / "pid1"
        named.with_suffix(".new").write_text(str(job.ranks[1].pid))
        named.with_suffix(".new").rename(named)
        job.until_report(both_wait)
        job.ranks[1].kill()
        for process in job.ranks:
            process.wait(30)
        job.wait()
    report = job.report()
    assert report.run.outcome is Outcome.KILLED
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert (finding.code, list(finding.ranks)) == ("HNG002", [1])


def test_a_missing_rank_is_reported_after_the_threshold_with_its_line(tmp_path):
    missing = f"rank.all_reduce()\ndef stuck():\n    {ALIVE}stuck()\n"
    with FakeJob(tmp_path / "run", [TRAIN_FOR_EVER, missing], hang_timeout_s=2.0) as job:
        job.until_report(lambda report: report.run.outcome is Outcome.HUNG)
        report = job.report()
    assert codes(report)
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert list(finding.ranks) == [1]
    text = msgspec.json.encode(msgspec.to_builtins(finding, enc_hook=list)).decode()
    assert "rank1.py" in text


def test_on_hang_abort_kills_the_ranks_and_their_children_and_completes_the_report(tmp_path):
    parent = (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)',"
        f" sys.argv[1]])\n{TRAIN_FOR_EVER}"
    )
    job = FakeJob(
        tmp_path / "run",
        [parent, "rank.all_reduce()\n" + ALIVE],
        hang_timeout_s=2.0,
        on_hang="abort",
    )
    with job:
        job.wait(40)
        assert [process.wait(5) for process in job.ranks] == [-signal.SIGKILL, -signal.SIGKILL]
        assert processes_of(tmp_path) == []
    report = job.report()
    assert report.complete
    assert report.run.outcome is Outcome.ABORTED
    assert statuses(report) == {0: "aborted", 1: "aborted"}
    assert "HNG002" not in codes(report)
    assert job.verdict().exit_status == 1


def processes_of(path):
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline", "status"])
        if str(path) in " ".join(process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_rank_0_is_released_when_another_rank_waits_for_it_in_vain(tmp_path):
    with FakeJob(tmp_path / "run", [FINISH, TRAIN_FOR_EVER]) as job:
        assert job.ranks[0].wait(20) == 0
        job.until(job.run_dir.verdict.exists)
        assert job.verdict().exit_status == 1
        assert job.ranks[1].poll() is None


def test_rank_0_is_released_when_it_has_failed_and_another_rank_goes_on(tmp_path):
    failing = "rank.all_reduce(); rank.fail('no such batch')\n"
    with FakeJob(tmp_path / "run", [failing, "rank.all_reduce()\n" + ALIVE]) as job:
        assert job.ranks[0].wait(20) == 1
        job.until(job.run_dir.verdict.exists)
        assert job.ranks[1].poll() is None


def test_rank_0_waits_for_ranks_that_still_work(tmp_path):
    slow = "rank.all_reduce(); time.sleep(3); rank.finish()\n"
    with FakeJob(tmp_path / "run", [FINISH, slow]) as job:
        job.wait()
    assert float((tmp_path / "run" / "waited-0").read_text()) > 1
    assert job.report().run.outcome is Outcome.FINISHED


def test_signals_of_the_launcher_do_not_end_the_monitor(tmp_path):
    with FakeJob(tmp_path / "run", [TRAIN_FOR_EVER]) as job:
        job.until_report(lambda report: report.run.outcome is Outcome.RUNNING)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            job.monitor.send_signal(number)
        time.sleep(0.5)
        assert job.monitor.poll() is None


def test_a_monitor_that_was_killed_can_be_started_again(tmp_path):
    with FakeJob(tmp_path / "run", [TRAIN_FOR_EVER, TRAIN_FOR_EVER]) as job:
        job.until_report(both_wait)
        job.monitor.kill()
        job.wait()
        assert "#1" in job.report().run.ranks[0].last
        job.ranks[1].kill()
        job.ranks[1].wait()
        job.start_monitor()
        job.until_report(lambda report: "HNG002" in codes(report))
        job.ranks[0].kill()
        job.ranks[0].wait()
        job.wait()
    assert job.report().complete
    assert job.report().run.outcome is Outcome.KILLED


def test_nobody_comes_and_the_launcher_is_gone(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    with FakeJob(tmp_path / "run", [None, None], launcher=launcher.pid) as job:
        job.wait()
    report = job.report()
    assert report.complete
    assert report.run.outcome is Outcome.FAILED
    assert list(report.silent_ranks) == [0, 1]


def test_a_rank_that_never_came_is_silent_and_does_not_keep_the_monitor(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(4)"])
    with FakeJob(tmp_path / "run", [FINISH, None], launcher=launcher.pid) as job:
        time.sleep(1)
        assert job.ranks[0].poll() is None
        launcher.kill()
        launcher.wait()
        job.wait()
        assert job.ranks[0].wait(10) == 0
    assert list(job.report().silent_ranks) == [1]


CRASHING = """
import sys
from distdiag.monitor import monitor
def crash(self, event):
    raise RuntimeError("injected")
monitor.Engine.feed = crash
sys.exit(monitor.main(sys.argv[1:]))
"""


def test_a_failure_of_the_monitor_is_a_finding_and_the_run_is_not_disturbed(tmp_path):
    with FakeJob(tmp_path / "run", [FINISH, FINISH], monitor_code=CRASHING) as job:
        job.wait()
        assert [rank.wait(10) for rank in job.ranks] == [0, 0]
    report = job.report()
    assert report.complete
    assert report.run.outcome is Outcome.FINISHED
    (finding,) = report.findings
    assert finding.code == "DIA001"
    assert "RuntimeError: injected" in finding.message
    assert "RuntimeError: injected" in job.run_dir.monitor_log.read_text()
    assert job.verdict().exit_status == 0


def test_findings_of_an_earlier_attempt_stay_in_the_report_but_not_in_the_verdict(tmp_path):
    bodies = [f"rank.all_reduce({size}); rank.finish()\n" for size in (4, 5)]
    with FakeJob(tmp_path / "run", bodies) as job:
        job.wait()
    first = job.report()
    assert codes(first) == {"COL003"}
    with FakeJob(tmp_path / "run", [FINISH, FINISH], attempt=1) as job:
        job.wait()
    second = job.report()
    assert codes(second) == {"COL003"}
    assert second.run.started == first.run.started
    assert second.run.attempts == 2
    assert second.run.outcome is Outcome.FINISHED
    assert job.verdict().exit_status == 0


def test_a_damaged_event_file_is_reported_and_the_rest_is_judged(tmp_path):
    with FakeJob(tmp_path / "run", [FINISH, FINISH], is_monitored=False) as job:
        # Damage is seen only where the writer does not write any more and nobody has read yet.
        job.ranks[1].wait(20)
        with segment_path(job.run_dir.folder, 1, 0).open("r+b") as file:
            file.seek(START)
            file.write(b"\xff\xff\xff\x7f")
        job.start_monitor()
        job.wait()
    report = job.report()
    assert report.complete
    assert statuses(report)[0] == "finished"
    assert "claims" in report.not_checked["rank 1"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small tmpfs to fill it")
def test_on_a_full_disk_the_report_is_written_in_the_room_set_aside(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(root)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    working = "rank.all_reduce(); time.sleep(6); rank.all_reduce(); rank.finish()\n"
    try:
        with FakeJob(root, [working, working]) as job:
            job.until_report(lambda report: not report.silent_ranks)
            fill(root)
            stderr = job.wait()
            report = job.report()
            assert [rank.wait(10) for rank in job.ranks] == [0, 0], stderr
    finally:
        subprocess.run(["umount", str(root)], check=True)
    assert report.complete
    assert report.run.outcome is Outcome.FINISHED
    assert "all_reduce #1" in report.run.ranks[1].last


WITHOUT_VERDICT = """
from distdiag.events.lifecycle import Finished
from distdiag.record.status_page import FINISHED
rank.all_reduce()
while rank.run_dir.root.exists():
    time.sleep(0.1)
rank.recorder.event(Finished, exit_status=0)
rank.recorder.raise_flag(FINISHED)
os._exit(0)
"""


def test_a_run_whose_directory_is_removed_ends_without_a_traceback(tmp_path):
    with FakeJob(tmp_path / "run", [WITHOUT_VERDICT] * 2) as job:
        job.until_report(lambda report: not report.silent_ranks)
        shutil.rmtree(tmp_path / "run")
        stderr = job.wait()
        assert [rank.wait(10) for rank in job.ranks] == [0, 0], stderr
    assert "Traceback" not in stderr
    said = " ".join(stderr.split())  # whatever the lines are cut at
    assert "the run finished" in said or "was removed" in said


def fill(folder):
    descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    os.write(descriptor, b"x" * size)
            except OSError:
                continue
    finally:
        os.close(descriptor)
