from distdiag.checks.moe.differing_capacity import DifferingCapacity
from distdiag.checks.moe.exchange_mismatch import ExchangeMismatch
from distdiag.engine.routing.exchanges import ExchangeAligner
from distdiag.events.lifecycle import StepEnd
from distdiag.views.routing import RoundTrip, UnfitExchange
from tests.checks.exchanges import exchange
from tests.engine.aligned import aligned, broken


def found(*parts, ends=True):
    events = [e for part in parts for e in (part.call, part.event)]
    return exchanged(*events, ends=ends).codes


def exchanged(*events, ends=True):
    checks = [DifferingCapacity(), ExchangeMismatch()]
    return aligned(ExchangeAligner, *events, checks=checks, ends=ends)


def test_a_contradiction_is_reported_before_the_exchange_ends():
    parts = exchange(0, (6, 6), (6, 6), even=True), exchange(1, (8, 8), (8, 8), even=True)
    assert found(*parts, ends=False) == ["MOE011"]
    parts = exchange(0, (4, 5), (4, 3)), exchange(1, (2, 4), (5, 4))
    assert found(*parts, ends=False) == ["MOE003"]


def test_exchanges_of_different_order_are_not_compared():
    parts = exchange(0, (6, 6), (6, 6), seq_id=7), exchange(1, (8, 8), (8, 8), seq_id=8)
    assert found(*parts) == []


def test_the_way_back_is_compared_when_the_step_ends():
    there, back = exchange(0, (6, 5), (6, 4)), exchange(0, (4, 4), (4, 4), seq_id=8)
    end = StepEnd(rank=0, seq=0, time_ns=0, step=1, duration_s=1.0)
    assert not found(there, back, ends=False)
    events = there.call, there.event, back.call, back.event
    assert exchanged(*events, end, ends=False).codes == ["MOE003"]


def test_what_goes_beside_the_tokens_is_no_way_back():
    there, back = exchange(0, (6, 5), (6, 4)), exchange(0, (6, 4), (6, 5), seq_id=8)
    ids = exchange(0, (6, 5), (6, 4), dtype="int64")
    weights = exchange(0, (6, 5), (6, 4), width=1)
    assert found(there, ids, weights, back) == []
    assert found(there, exchange(0, (6, 5), (6, 4), seq_id=8)) == []


def test_more_than_one_pair_is_left_alone():
    parts = [exchange(0, (i, 5), (i, 6), seq_id=i) for i in range(1, 4)]
    assert found(*parts) == []


def test_what_was_not_seen_is_said():
    part = exchange()
    assert "no all-to-all" in exchanged().why(RoundTrip)
    assert not exchanged(part.call, part.event).gaps
    assert "rank 1" in exchanged(part.call, part.event, broken(1, "routing")).why(UnfitExchange)
