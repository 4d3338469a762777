"""What is left of a job is lived through in order: events, standstill, ends."""

from distdiag.analysis.analysis import Timeline
from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.lifecycle import Exited, Finished, Heartbeat
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks, ThreadStack
from distdiag.findings.finding import Severity

GROUP = ProcessGroup("0", "default_pg", (0, 1), "gloo")
SIGNATURE = Signature("all_reduce", ((4,),))
SITE = CallSite((Frame("train.py", 10, "main"),))


def call(rank, seq):
    return Collective(
        rank=rank,
        seq=seq,
        time_ns=0,
        group=GROUP,
        collective_seq_id=seq,
        signature=SIGNATURE,
        site=SITE,
    )


def live(sources, pause_s):
    """Return the engine after the job, and the events in the order in which they were seen."""
    seen = []
    engine = Engine([check() for check in load_checks().values()], RankSet((0, 1)))
    timeline = Timeline(engine, seen.append)
    timeline.feed(iter(events) for events in sources)
    timeline.stand_still(pause_s)
    timeline.end()
    return engine, seen


def bad(engine):
    return [(f.code, str(f.ranks)) for f in engine.findings if f.severity is not Severity.INFO]


def test_ranks_take_turns():
    _, seen = live([[call(0, 0), call(0, 1), call(0, 2)], [call(1, 0)]], 0)
    assert [(event.rank, event.seq) for event in seen] == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_a_long_pause_is_a_hang():
    engine, _ = live([[call(0, 0), call(0, 1)], [call(1, 0)]], 100)
    assert bad(engine) == [("COL001", "1")]
    assert engine.is_hung


def test_a_short_pause_is_none():
    engine, _ = live([[call(0, 0), call(0, 1)], [call(1, 0)]], 0.3)
    assert bad(engine) == []
    assert not engine.is_hung


def test_the_standstill_comes_before_the_ends_of_the_processes():
    exits = [Exited(rank=rank, seq=-1, time_ns=5 + rank) for rank in (0, 1)]
    engine, _ = live([[call(0, 0), call(0, 1), exits[0]], [call(1, 0), exits[1]]], 100)
    assert ("COL001", "1") in bad(engine)


def test_ranks_that_finished_stand_still_for_nobody():
    ends = [Finished(rank=rank, seq=5, time_ns=5, exit_status=0) for rank in (0, 1)]
    engine, _ = live([[call(0, 0), ends[0]], [call(1, 0), ends[1]]], 1000)
    assert bad(engine) == []


def test_a_rank_whose_stacks_were_dumped_lived():
    thread = ThreadStack("MainThread", (Frame("train.py", 7, "main"),))
    stacks = Stacks(rank=1, seq=-1, time_ns=0, source="py-spy", threads=(thread,))
    engine, _ = live([[call(0, 0)], [stacks]], 100)
    assert [str(f.location) for f in engine.findings if f.code == "COL001"] == ["train.py:7"]


def test_the_last_sign_of_life_tells_the_phase():
    beat = Heartbeat(rank=1, seq=-1, time_ns=0, phase=Phase.CHECKPOINT, beat_ns=0)
    engine, _ = live([[call(0, 0)], [beat]], 1000)
    assert engine.states()[1].phase is Phase.CHECKPOINT
    assert not engine.states()[1].gil_held
