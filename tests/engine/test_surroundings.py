"""When surroundings of ranks are compared."""

from distdiag.checks.env.clock_skew import ClockSkew
from distdiag.checks.env.differing_versions import DifferingVersions
from distdiag.events.environment import Fact, FactKind, NodeClock, Surroundings
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


def clock(rank, ahead_s, *, time_s=5.0):
    time_ns = int(time_s * 1e9)
    unix_ns = time_ns + int(ahead_s * 1e9)
    return NodeClock(rank=rank, seq=-1, time_ns=time_ns, hostname=f"n{rank}", unix_ns=unix_ns)


def test_clocks_are_compared_at_whatever_moments_they_were_read():
    found = engine_of(clock(0, 100.0), clock(1, 103.0, time_s=60.0), checks=[ClockSkew()]).findings
    assert [finding.code for finding in found] == ["ENV005"]
    engine = engine_of(clock(0, 100.0), clock(1, 100.2, time_s=60.0), checks=[ClockSkew()])
    assert not engine.findings
    assert "ENV005" not in engine.not_checked


def test_another_node_is_compared_with_those_before():
    clocks = (clock(0, 100.0), clock(1, 100.0), clock(0, 100.0), clock(1, 140.0))
    (finding,) = engine_of(*clocks, checks=[ClockSkew()]).findings
    assert "differ by 40.0 s" in finding.message


def test_one_node_has_no_clock_to_compare():
    engine = engine_of(clock(0, 100.0), checks=[ClockSkew()])
    assert not engine.findings
    assert "clocks" in engine.not_checked["ENV005"]
