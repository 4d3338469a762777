"""When surroundings of ranks are compared."""

from distdiag.checks.env.differing_versions import DifferingVersions
from distdiag.events.environment import Fact, FactKind, Surroundings
from distdiag.events.ranks import RankSet
from tests.engine.aligned import engine_of


def told(rank, torch):
    facts = (Fact(FactKind.VERSION, "torch", torch),)
    return Surroundings(rank=rank, seq=0, time_ns=0, facts=facts)


def test_they_are_compared_when_all_ranks_have_told_theirs():
    engine = engine_of(told(0, "2.9"), told(1, "2.8"), checks=[DifferingVersions()])
    assert [finding.code for finding in engine.findings] == ["ENV002"]


def test_one_rank_alone_is_not_judged_and_the_report_says_so():
    engine = engine_of(told(0, "2.9"), checks=[DifferingVersions()])
    assert not engine.findings
    assert "ENV002" in engine.not_checked


def test_they_are_compared_once():
    events = [told(rank, f"2.{rank}") for rank in (0, 1, 0, 1)]
    (finding,) = engine_of(*events, checks=[DifferingVersions()]).findings
    assert finding.ranks == RankSet((0, 1))
