"""Which ranks of a job nobody reads, and that nothing is said to be compared then."""

from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.events.lifecycle import Finished
from distdiag.events.ranks import RankSet
from tests.checks.dia.test_silent_rank import begun, spawned, started

NEVER_ALONE = {"COL001", "COL003", "BAR001", "REP001", "SHD001", "DAT002", "PAR001", "CKP006"}
ALONE = {"DIA001", "DIA002", "DIA003", "COL010", "HNG001", "HNG002", "HNG004"}


def judged(*events, world=(0,)):
    engine = Engine([check() for check in load_checks().values()], RankSet(world))
    for event in events:
        engine.feed(event)
    engine.finish()
    return engine


def test_the_ranks_of_a_group_beyond_the_world_are_unobserved():
    engine = judged(started(), begun((0, 1, 2)), Finished(rank=0, seq=3, time_ns=9, exit_status=0))
    assert engine.unobserved == RankSet([1, 2])
    reason = "only rank 0 was observed and not ranks 1-2, so no ranks were compared"
    assert {code for code, why in engine.not_checked.items() if why == reason} >= NEVER_ALONE
    assert not ALONE & engine.not_checked.keys()


def test_a_job_of_which_two_ranks_are_observed_was_compared():
    engine = judged(started(2), begun((0, 1, 2)), world=(0, 1))
    assert engine.unobserved == RankSet([2])
    assert "COL001" not in engine.not_checked


def test_whoever_is_alone_misses_nobody():
    engine = judged(started(), begun((0,)))
    assert not engine.unobserved
    assert "COL001" not in engine.not_checked


def test_all_ranks_that_are_spawned_are_unobserved_until_their_parent_is_a_rank_itself():
    engine = judged(started(), spawned(2))
    assert engine.unobserved == RankSet([0, 1])
    assert engine.not_checked["COL001"] == "ranks 0-1 were not observed, so no ranks were compared"
    assert not judged(started(), spawned(2), begun((0,))).unobserved
    assert not judged(started(), begun((0,)), spawned(2)).unobserved
