import pytest

from distdiag.checks.bar.concurrent_writers import ConcurrentWriters
from distdiag.checks.bar.rank_guard_before_init import RankGuardBeforeInit
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.races import access, alarms, race
from tests.checks.streams import Program


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path, "if get_rank() == 0:\n    download()\nread()\n")


def writers(site, **values):
    return race("two-writes", [access(rank, "write", site, **values) for rank in (0, 1)])


def test_a_guard_that_held_on_two_ranks_before_init_names_the_second(program):
    shown = writers(program.site("download()"), is_before_init=True)
    (finding,) = alarms(RankGuardBeforeInit, shown)
    assert (finding.ranks, finding.severity) == (RankSet([1]), Severity.WARNING)
    assert "`if get_rank() == 0:`" in finding.message
    assert not alarms(ConcurrentWriters, shown)


def test_the_same_after_init_has_another_reason(program):
    shown = writers(program.site("download()"))
    assert not alarms(RankGuardBeforeInit, shown)
    assert alarms(ConcurrentWriters, shown)


def test_without_a_guard_it_is_not_the_guard(program):
    shown = writers(program.site("read()"), is_before_init=True)
    assert not alarms(RankGuardBeforeInit, shown)
