from distdiag.checks.moe.differing_capacity import DifferingCapacity
from distdiag.checks.moe.exchange_mismatch import ExchangeMismatch
from distdiag.engine.routing.exchanges import ExchangeWatch
from distdiag.engine.runner import Judges
from distdiag.events.lifecycle import ProbeDisabled, StepEnd
from distdiag.events.ranks import RankSet
from tests.checks.exchanges import exchange


def watched(*parts, ends=True):
    judges = Judges([DifferingCapacity(), ExchangeMismatch()])
    watch = ExchangeWatch(RankSet([0, 1]), judges)
    for part in parts:
        for event in (part.call, part.event) if hasattr(part, "call") else (part,):
            watch.feed(event)
    if ends:
        watch.finish()
    return watch, [finding.code for finding in judges.conclusions.all()]


def test_a_contradiction_is_told_before_the_exchange_ends():
    parts = exchange(0, (6, 6), (6, 6), even=True), exchange(1, (8, 8), (8, 8), even=True)
    assert watched(*parts, ends=False)[1] == ["MOE011"]
    parts = exchange(0, (4, 5), (4, 3)), exchange(1, (2, 4), (5, 4))
    assert watched(*parts, ends=False)[1] == ["MOE003"]


def test_exchanges_of_different_order_are_not_compared():
    parts = exchange(0, (6, 6), (6, 6), seq_id=7), exchange(1, (8, 8), (8, 8), seq_id=8)
    assert watched(*parts)[1] == []


def test_the_way_back_is_compared_when_the_step_ends():
    there, back = exchange(0, (6, 5), (6, 4)), exchange(0, (4, 4), (4, 4), seq_id=8)
    end = StepEnd(rank=0, seq=0, time_ns=0, step=1, duration_s=1.0)
    assert watched(there, back, ends=False)[1] == []
    assert watched(there, back, end, ends=False)[1] == ["MOE003"]


def test_what_goes_beside_the_tokens_is_no_way_back():
    there, back = exchange(0, (6, 5), (6, 4)), exchange(0, (6, 4), (6, 5), seq_id=8)
    ids = exchange(0, (6, 5), (6, 4), dtype="int64")
    weights = exchange(0, (6, 5), (6, 4), width=1)
    assert watched(there, ids, weights, back)[1] == []
    assert watched(there, exchange(0, (6, 5), (6, 4), seq_id=8))[1] == []


def test_more_than_one_pair_is_left_alone():
    parts = [exchange(0, (i, 5), (i, 6), seq_id=i) for i in range(1, 4)]
    assert watched(*parts)[1] == []


def test_what_was_not_seen_is_said():
    assert "no exchange" in watched()[0].not_checked["MOE003"]
    assert watched(exchange())[0].not_checked == {}
    off = ProbeDisabled(rank=1, seq=0, time_ns=0, step=0, probe="routing", reason="", traceback="")
    assert "rank 1" in watched(exchange(), off)[0].not_checked["MOE011"]
