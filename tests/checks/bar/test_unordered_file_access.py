import pytest

from distdiag.checks.bar.unordered_file_access import UnorderedFileAccess
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.races import access, barrier, missing_file, race, read_of_write
from tests.checks.streams import Program, plain_site
from tests.checks.verdicts import findings

PREPARE = """
    def main(rank):
        if rank == 0:
            save()
        load()
"""


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path, PREPARE)


def test_a_read_that_nothing_orders_names_both_lines(program):
    shown = read_of_write(program.site("save()"), program.site("load()"))
    (finding,) = findings(UnorderedFileAccess, shown)
    assert (finding.ranks, finding.severity, finding.grade) == (
        RankSet([1, 2]),
        Severity.WARNING,
        Grade.LIKELY,
    )
    assert finding.location.line == program.line("load()")
    assert {e.location.line for e in finding.evidence if e.location} == {
        program.line("save()"),
        program.line("load()"),
    }
    assert finding.subjects == ("/data/cache.pt", "cache.pt")


def test_the_advice_puts_the_barrier_outside_of_the_guard(program):
    shown = read_of_write(program.site("save()"), program.site("load()"))
    (finding,) = findings(UnorderedFileAccess, shown)
    assert f"after the block under `if rank == 0:` at {program.path}:2" in finding.fix
    assert f"before {program.path}:{program.line('load()')}" in finding.fix


def test_a_race_that_has_struck_is_proven():
    shown = read_of_write(plain_site(1), plain_site(2), has_struck=True)
    (finding,) = findings(UnorderedFileAccess, shown)
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.PROVEN)


def test_a_reader_that_failed_is_proof_and_evidence():
    raised = {1: missing_file(1, "/data/cache.pt")}
    shown = read_of_write(plain_site(1), plain_site(2), change="rename", raised=raised)
    (finding,) = findings(UnorderedFileAccess, shown)
    assert finding.grade is Grade.PROVEN
    assert "FileNotFoundError" in finding.evidence[-1].summary


def test_the_last_common_point_is_evidence():
    shown = read_of_write(plain_site(1), plain_site(2), common_sync=barrier(number=3))
    (finding,) = findings(UnorderedFileAccess, shown)
    assert any("barrier #3 in group default_pg" in e.summary for e in finding.evidence)


def test_a_reader_that_copes_with_absence_may_meet_a_rename(tmp_path):
    program = Program(tmp_path, "try:\n    load()\nexcept FileNotFoundError:\n    pass\n")
    site = program.site("load()")
    assert not findings(UnorderedFileAccess, read_of_write(plain_site(1), site, change="rename"))
    assert findings(UnorderedFileAccess, read_of_write(plain_site(1), site, change="write"))


def test_ranks_that_write_and_read_are_named_at_their_read():
    shown = race(
        "read-of-write",
        [access(rank, "write", plain_site(3)) for rank in (0, 1)],
        [access(rank, "read", plain_site(8)) for rank in (0, 1)],
    )
    (finding,) = findings(UnorderedFileAccess, shown)
    assert (finding.ranks, finding.location.line) == (RankSet([0, 1]), 8)
