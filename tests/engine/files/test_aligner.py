"""What the engine shows to checks of files."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distdiag.checks import load_checks
from distdiag.checks.base import Check
from distdiag.engine.files.aligner import FileAligner, MissingFiles
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Severity
from distdiag.views.alignment import FileTestView
from distdiag.views.files import Race
from tests.checks.races import access, missing_file
from tests.checks.streams import plain_site
from tests.engine.aligned import aligned
from tests.engine.stream import Job
from tests.engine.traces import Trace

HERE, THERE = "/node0/index.npy", "/node1/index.npy"


class Racy(Check[Race]):
    """Says of every race who takes part."""

    code, name, severity = "BAR999", "race", Severity.WARNING

    def check(self, view):
        evidence = (Evidence(ranks=view.ranks, summary="raced"),)
        yield self.finding(view.conflict.value, ranks=view.ranks, evidence=evidence)


def fed(job, trace):
    for event in trace.events:
        job.engine.feed(event)
    trace.events.clear()


def test_what_is_found_of_a_race_is_replaced_as_it_grows():
    job, trace = Job(3, checks=[Racy()]), Trace(3)
    trace.write(0, line=10)
    for rank in (1, 2):
        trace.access(rank, "read", line=20)
        trace.access(rank, "read", "/d/other")
        fed(job, trace)
        job.passes(0.5)
        (finding,) = job.engine.findings
        assert finding.ranks == RankSet(range(rank + 1))
    assert job.engine.checked == ("BAR999",)


def test_calls_that_contradict_one_another_order_nothing_that_could_be_believed():
    mismatch = load_checks()["COL002"]
    job, trace = Job(2, checks=[Racy(), mismatch()]), Trace(2)
    trace.call(0, "barrier")
    trace.call(1, "all_reduce")
    trace.write(0)
    trace.access(1, "read")
    fed(job, trace)
    job.engine.finish()
    assert job.codes == ["COL002"]
    assert "not known" in job.engine.not_checked["BAR999"]


def test_a_job_of_one_rank_has_no_races_to_look_for():
    trace = Trace(1)
    trace.write(0)
    trace.access(0, "read")
    assert not aligned(FileAligner, *trace.events, world=[0]).views


def test_tests_that_found_different_things_are_shown_side_by_side():
    trace = Trace(2)
    trace.access(0, "test", "/d/f", 5, found=True)
    for answer in (False, False):
        trace.access(1, "test", "/d/f", 5, found=answer)
    trace.everyone()
    for rank in (0, 1):
        trace.access(rank, "test", "/d/f", 5, found=True)
    trace.everyone()
    (test,) = [v for v in aligned(FileAligner, *trace.events).views if isinstance(v, FileTestView)]
    assert test.key == ("/d/f", 0)
    assert [each.found for each in test.by_rank.values()] == [True, False]


def test_a_file_that_was_never_there_is_shown_at_the_end():
    trace = Trace(2)
    trace.write(0, HERE)
    read = trace.access(1, "read", THERE)
    message = f"[Errno 2] No such file or directory: '{THERE}'"
    trace.raises(1, read, message, "FileNotFoundError")
    (missing,) = aligned(FileAligner, *trace.events).views
    assert (missing.path, list(missing.namesakes)) == (THERE, [0])


# Files that are missing


def event(rank, action, path):
    return access(rank, action, plain_site(3), path, written=path).event


@pytest.fixture
def files():
    files = MissingFiles()
    files.add(event(0, "write", HERE))
    files.add(event(1, "read", THERE))
    return files


def test_the_writer_of_a_namesake_is_found(files):
    found = files.explain(missing_file(1, THERE))
    assert (found.rank, found.path, list(found.namesakes)) == (1, THERE, [0])


def test_a_file_that_was_written_is_a_matter_of_order(files):
    files.add(event(0, "write", THERE))
    assert files.explain(missing_file(1, THERE)) is None


def test_a_relative_name_is_found_by_the_access(files):
    raised = missing_file(1, "cache/index.npy")
    files.add(replace(event(1, "read", THERE), written="cache/index.npy"))
    assert files.explain(raised).path == THERE


def test_the_folders_that_ranks_made_above_it_are_told(files):
    for rank, path in ((0, "/node0"), (1, "/node1"), (1, "/elsewhere")):
        files.add(event(rank, "make-dir", path))
    found = files.explain(missing_file(1, THERE))
    assert {rank: each.path for rank, each in found.folders.items()} == {0: "/node0", 1: "/node1"}
    assert found.written == THERE


def test_a_part_of_the_same_kind_is_found(files):
    files.add(event(0, "write", "/d/step3/part0.pt"))
    found = files.explain(missing_file(1, "/d/step3/part1.pt"))
    assert [access.path for access in found.siblings.values()] == ["/d/step3/part0.pt"]
    assert files.explain(missing_file(1, "/d/step4/part1.pt")) is None
    assert files.explain(missing_file(0, "/d/step3/part1.pt")) is None


@pytest.mark.parametrize("path", ["/node1/other.npy", "relative.npy"])
def test_a_file_of_which_nobody_wrote_a_namesake_says_nothing(files, path):
    assert files.explain(missing_file(1, path)) is None


def test_another_exception_says_nothing(files):
    raised = replace(missing_file(1, THERE), type="ValueError", message=f"bad header in {THERE}")
    assert files.explain(raised) is None
