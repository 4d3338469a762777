"""What the engine shows to checks of files."""

from __future__ import annotations

from distdiag.checks import load_checks
from distdiag.checks.base import Check
from distdiag.events.files import FileAccess
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Severity
from tests.engine.stream import Job
from tests.engine.traces import Trace


class Racy(Check):
    """Says of every race who takes part."""

    code, name, severity = "BAR999", "race", Severity.WARNING
    needs = (FileAccess,)

    def check_race(self, race):
        evidence = (Evidence(ranks=race.ranks, summary="raced"),)
        yield self.finding(race.conflict.value, ranks=race.ranks, evidence=evidence)


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
    assert Job(1).engine._files is None
    assert Job(2).engine._files is not None


def test_tests_that_found_different_things_are_shown_side_by_side():
    class Apart(Racy):
        def check_alignment(self, alignment):
            found = [test.found for test in alignment.by_rank.values()]
            yield self.finding(f"{alignment.key} {found}", ranks=RankSet((0,)), evidence=())

    job, trace = Job(2, checks=[Apart()]), Trace(2)
    trace.access(0, "test", "/d/f", 5, found=True)
    for answer in (False, False):
        trace.access(1, "test", "/d/f", 5, found=answer)
    trace.everyone()
    for rank in (0, 1):
        trace.access(rank, "test", "/d/f", 5, found=True)
    trace.everyone()
    fed(job, trace)
    job.passes(0.5)
    assert [f.message for f in job.engine.findings] == ["('/d/f', 0) [True, False]"]


def test_a_file_that_was_never_there_is_shown_at_the_end():
    class Lacking(Racy):
        def check_missing_file(self, missing):
            ranks = RankSet(missing.namesakes)
            yield self.finding(missing.path, ranks=ranks, evidence=())

    job, trace = Job(2, checks=[Lacking()]), Trace(2)
    trace.write(0, "/node0/index.npy")
    read = trace.access(1, "read", "/node1/index.npy")
    message = "[Errno 2] No such file or directory: '/node1/index.npy'"
    trace.raises(1, read, message, "FileNotFoundError")
    fed(job, trace)
    job.passes(0.5)
    assert job.engine.findings == ()
    job.engine.finish()
    assert [(f.message, f.ranks) for f in job.engine.findings] == [
        ("/node1/index.npy", RankSet((0,)))
    ]
