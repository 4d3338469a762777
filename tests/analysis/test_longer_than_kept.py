"""A run that wrote more events than are kept is judged as it was while it went on."""

import pytest

from distdiag.analysis import analyze
from distdiag.findings.finding import Outcome, Severity
from tests.fake_ranks import FakeJob

pytestmark = pytest.mark.timeout(120)

START = """
import json
from distdiag.events.files import FileAction, FileClosed, StoreCall
from distdiag.events.base import CallSite, Frame

def access(action):
    site = CallSite((Frame("train.py", 5 + rank.rank, "main"),))
    known = rank.recorder.define_site(site, site, api=None, is_own_call=True, kept_alive=None)
    more = ("open", "", True, False, None, True)
    number = rank.recorder.access(action, "/data/a.pt", "a.pt", known.number, *more)
    rank.recorder.event(FileClosed, access=number)

def pad(mebibytes):
    for _ in range(64 * mebibytes):
        rank.recorder.event(StoreCall, action="wait", store="job", keys=("x" * 16000,), done=True)

def wait_for(code):
    def codes():
        path = rank.run_dir.report
        findings = json.loads(path.read_bytes())["findings"] if path.exists() else ()
        return {finding["code"] for finding in findings}

    while code not in codes():
        # What ranks did is put in order up to where something has come of all of them.
        rank.recorder.event(StoreCall, action="wait", store="job", keys=("x",), done=True)
        time.sleep(0.02)

pad(1)  # what comes now is not in the first segment
"""
RACE = """
access(FileAction.WRITE if rank.rank == 0 else FileAction.READ)
rank.all_reduce()
wait_for("BAR001")
"""
LATER = """
for number in range(50):
    rank.all_reduce(line=30)
pad(5 + rank.rank)  # other calls are the first that are kept of each rank
for number in range(50):
    rank.all_reduce(line=30)
"""


def alarms(report):
    return {
        (each.code, str(each.ranks))
        for each in report.findings
        if each.severity is not Severity.INFO
    }


def assert_gap_is_told(report):
    (told,) = [text for what, text in report.not_checked.items() if what.startswith("older events")]
    assert "all events are kept from step" in told


def test_what_was_found_in_events_that_are_gone_stands_and_the_end_is_judged(tmp_path):
    waits = START + RACE + LATER + "rank.all_reduce(line=40, done=False)\ntime.sleep(600)\n"
    leaves = START + RACE + LATER + "rank.finish()\n"
    with FakeJob(
        tmp_path / "run", [waits, leaves], keep_events=4, on_hang="abort", hang_timeout_s=3.0
    ) as job:
        job.wait(timeout_s=90)
        for rank in job.ranks:
            rank.wait(timeout=30)
        live = job.report()
    assert live.run.outcome is Outcome.ABORTED
    assert alarms(live) == {("BAR001", "1"), ("COL001", "1")}
    kept = {path.name for path in job.run_dir.folder.glob("rank-0.*.events")}
    assert "rank-0.000001.events" not in kept
    assert len(kept) == 4
    again = analyze([tmp_path / "run"])
    assert alarms(again) == alarms(live)
    assert again.run.outcome is Outcome.ABORTED
    assert_gap_is_told(again)


def test_a_correct_run_that_is_longer_gives_nothing(tmp_path):
    body = START + "rank.all_reduce()\n" + LATER + "rank.finish()\n"
    with FakeJob(tmp_path / "run", [body, body, body], keep_events=4) as job:
        job.wait(timeout_s=90)
        for rank in job.ranks:
            rank.wait(timeout=30)
        live = job.report()
    again = analyze([tmp_path / "run"])
    for report in (live, again):
        assert report.run.outcome is Outcome.FINISHED
        assert not alarms(report)
    assert_gap_is_told(again)
