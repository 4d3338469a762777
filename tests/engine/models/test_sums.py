"""Layers whose shards are the same on all ranks, from the events of the ranks."""

from distdiag.checks.shd.repeated_shard import RepeatedShard
from distdiag.events.base import CallSite
from distdiag.events.models import PartsSummed
from tests.engine.aligned import engine_of


def summed(rank, step, digest="a", weights=(("up.weight", "w"), ("down.weight", "v")), **fields):
    return PartsSummed(
        rank=rank,
        seq=step,
        time_ns=step,
        step=step,
        digest=digest,
        weights=weights,
        site=CallSite(()),
        **{"module": "Net/mlp", "number": 0, "members": (0, 1), **fields},
    )


def found(*events):
    return engine_of(*events, checks=[RepeatedShard()]).findings


def test_shards_that_stay_the_same_over_a_step_are_reported_with_their_names():
    (finding,) = found(*(summed(rank, step) for step in (0, 1, 2) for rank in (0, 1)))
    assert finding.code == "SHD027"
    assert tuple(finding.ranks) == (0, 1)
    assert finding.subjects == ("up.weight", "down.weight")
    assert finding.step == 1


def test_shards_that_begin_with_one_constant_are_not():
    same = [summed(rank, 0) for rank in (0, 1)]
    assert not found(*same)
    later = [summed(rank, step, digest=f"{rank}") for step in (1, 2) for rank in (0, 1)]
    assert not found(*same, *later)


def test_other_weights_or_other_parts_are_what_should_be():
    both = [(rank, step) for step in (0, 1) for rank in (0, 1)]
    own = [summed(rank, step, weights=(("up.weight", f"{rank}"),)) for rank, step in both]
    assert not found(*own)
    parts = [summed(rank, step, digest=f"{rank}") for rank, step in both]
    assert not found(*parts)


def test_a_sum_that_only_one_rank_reports_is_not_judged():
    assert not found(*(summed(0, step) for step in (0, 1, 2)))
