from types import SimpleNamespace

import msgspec

from distdiag.engine.losses.gradients import GradientWatch
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.gradients import GradientSums
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import ModelState
from distdiag.events.ranks import RankSet
from tests.checks.gradients import look
from tests.checks.streams import plain_site

PAIR = ProcessGroup("0", "default_pg", (0, 1), "gloo")


class Judges:
    """Remembers what it was shown."""

    def __init__(self):
        self.views = []

    def needing(self, kind):
        sums, both = SimpleNamespace(code="MOE012"), SimpleNamespace(code="SEQ012")
        return {GradientSums: (sums, both), ModelState: (both,)}.get(kind, ())

    def judge_gradients(self, view):
        self.views.append(view)


def call(rank, seq, op):
    return Collective(
        rank=rank,
        seq=seq,
        time_ns=0,
        step=0,
        group=PAIR,
        collective_seq_id=seq,
        signature=Signature(op, ((4,),)),
        site=plain_site(3),
    )


def watched(*events):
    judges = Judges()
    watch = GradientWatch(RankSet([0, 1]), judges)
    for event in events:
        watch.feed(event)
    return watch, judges.views


def sums(rank):
    return look(0, 2.0, 1.0).by_rank[rank]


def test_a_step_is_judged_when_all_ranks_have_told():
    watch, views = watched(call(0, 11, "all_to_all_single"), call(0, 3, "all_reduce"), sums(0))
    assert not views
    watch.feed(sums(1))
    ((one,),) = [view.looks for view in views]
    assert one.exchanges[0] == ((), (0, 1), ())
    assert one.exchanges[1] == ((), (), ())
    assert one.groups == frozenset({(0, 1)})
    assert not watch.not_checked


def test_what_not_all_ranks_have_told_is_judged_at_the_end():
    watch, views = watched(sums(1))
    watch.finish()
    assert [tuple(view.ranks) for view in views] == [(1,)]


def test_it_is_told_when_nothing_was_exchanged_or_a_rank_is_blind():
    watch, _ = watched(sums(0), sums(1))
    assert "all-to-all" in watch.not_checked["MOE012"]
    assert "SEQ012" not in watch.not_checked
    disabled = ProbeDisabled(
        rank=1, seq=1, time_ns=0, step=0, probe="gradient-sums", reason="", traceback=""
    )
    watch.feed(msgspec.structs.replace(disabled))
    assert "rank 1" in watch.not_checked["MOE012"]
    assert "rank 1" in watch.not_checked["SEQ012"]
