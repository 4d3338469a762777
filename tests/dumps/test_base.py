"""Dump sources used together, one of which is stuck, raises or looks at all ranks at once."""

import threading

import pytest

from distdiag.dumps.base import AT_ONCE, DumpSource, RankDumpSource, observe_all


class Told(RankDumpSource):
    name = "told"

    def observe_rank(self, rank, pid, timeout_s):
        return self.observed(rank, f"pid {pid}", {"pid": pid})


class Together(DumpSource):
    name = "together"

    def __init__(self):
        self.calls = []

    def observe(self, pids, timeout_s):
        self.calls.append(dict(pids))
        return tuple(self.observed(rank, "one of all") for rank in pids)


class Raising(Told):
    name = "raising"

    def observe_rank(self, rank, pid, timeout_s):
        raise LookupError("no such thing")


class Stuck(Told):
    name = "stuck"

    def __init__(self):
        self.let_go = threading.Event()

    def observe_rank(self, rank, pid, timeout_s):
        if rank == 1:
            self.let_go.wait(60)
        return super().observe_rank(rank, pid, timeout_s)


def test_an_event_is_the_monitors_own():
    (event,) = observe_all([Told()], {4: 44}, timeout_s=30)
    assert (event.rank, event.seq, event.source) == (4, -1, "told")
    assert (event.summary, event.values, event.error) == ("pid 44", {"pid": 44}, "")
    assert event.time_ns > 0


def test_all_sources_tell_of_all_ranks_in_order():
    together = Together()
    events = observe_all([Told(), together], {2: 22, 5: 55}, timeout_s=30)
    assert [(event.source, event.rank) for event in events] == [
        ("told", 2),
        ("told", 5),
        ("together", 2),
        ("together", 5),
    ]
    assert together.calls == [{2: 22, 5: 55}]


def test_a_source_that_raises_silences_nobody():
    events = observe_all([Raising(), Told()], {0: 1}, timeout_s=30)
    assert [event.error for event in events] == ["LookupError: no such thing", ""]


def test_who_is_stuck_is_left_behind_for_that_rank_only():
    stuck = Stuck()
    try:
        events = observe_all([stuck, Told()], {0: 10, 1: 11, 2: 12}, timeout_s=5.0)
    finally:
        stuck.let_go.set()
    assert [event.error for event in events] == [
        "",
        "no answer within 5 s",
        "",
        "",
        "",
        "",
    ]


def test_more_ranks_than_are_looked_at_at_once_are_all_told():
    pids = {rank: rank + 100 for rank in range(3 * AT_ONCE + 1)}
    events = observe_all([Told()], pids, timeout_s=30)
    assert [event.values["pid"] for event in events] == list(pids.values())


def test_a_source_of_single_ranks_can_tell_of_several():
    assert [event.rank for event in Told().observe({3: 1, 4: 2}, 1.0)] == [3, 4]


@pytest.mark.parametrize(("sources", "pids"), [([], {0: 1}), ([Told(), Together()], {})])
def test_nobody_to_ask_or_nobody_to_tell_of_is_nothing(sources, pids):
    assert observe_all(sources, pids, timeout_s=1) == ()
