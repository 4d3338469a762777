from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import ProcessGroup, Signature
from distdiag.events.errors import CollectiveMismatchError
from distdiag.probes.collectives.strict import StrictGate

GROUP = ProcessGroup("0", "default_pg", (0, 1), "gloo")


def site(line: int) -> CallSite:
    return CallSite((Frame("train.py", line, "main"),))


def signature(op: str = "all_reduce", size: int = 4, **others: object) -> Signature:
    return Signature(op, ((size,),), (), ("float32",), **others)


class Pair:
    """Two ranks as two threads over one store."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=30))
        self.gates = [StrictGate(rank, timeout_s, lambda: self.store) for rank in (0, 1)]

    def compare(self, seq_id: int, *signatures: Signature) -> list[Exception | None]:
        results: list[Exception | None] = [None, None]

        def run(rank: int) -> None:
            try:
                self.gates[rank].compare(GROUP, seq_id, signatures[rank], site(10 + rank))
            except CollectiveMismatchError as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def test_equal_calls_pass_one_after_the_other():
    pair = Pair()
    for seq_id in range(1, 4):
        assert pair.compare(seq_id, signature(), signature()) == [None, None]


def test_announcements_of_earlier_calls_are_taken_back():
    pair = Pair()
    for seq_id in range(1, 6):
        pair.compare(seq_id, signature(), signature())
    assert not pair.store.check(["0/0/3/0"])
    assert pair.store.check(["0/0/5/0"])


@pytest.mark.parametrize(
    ("other", "aspect"),
    [
        (signature("broadcast", root=0), "op"),
        (signature(size=5), "shape"),
        (Signature("all_reduce", ((4,),), (), ("int32",)), "dtype"),
        (signature(reduce_op="MAX"), "reduce op"),
    ],
)
def test_a_contradiction_is_raised_on_both_ranks_with_both_lines(other, aspect):
    errors = Pair().compare(1, signature(reduce_op="SUM"), other)
    for error in errors:
        assert f"disagree on {aspect}" in str(error)
        assert "train.py:10" in str(error)
        assert "train.py:11" in str(error)


def test_roots_that_differ_are_a_contradiction():
    errors = Pair().compare(1, signature("broadcast", root=0), signature("broadcast", root=1))
    assert all("disagree on root" in str(error) for error in errors)


def test_a_rank_that_does_not_come_is_waited_for_only_once():
    pair = Pair(timeout_s=0.2)
    pair.gates[0].compare(GROUP, 1, signature(), site(10))
    for seq_id in range(2, 50):
        pair.gates[0].compare(GROUP, seq_id, signature(), site(10))
    assert pair.store.check(["0/0/1/0"])
    assert not any(pair.store.check([f"0/0/{seq_id}/0"]) for seq_id in range(2, 50))


def test_a_group_of_one_has_nobody_to_compare_with():
    alone = ProcessGroup("1", "", (0,), "gloo")
    StrictGate(0, 5.0, dist.HashStore).compare(alone, 1, signature(), site(10))
