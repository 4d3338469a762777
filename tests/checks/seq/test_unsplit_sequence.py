import pytest

from distdiag.checks.seq.unsplit_sequence import UnsplitSequence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.sequences import both, passed, shared, use
from tests.checks.verdicts import findings


def same(number, **values):
    """Both ranks give the same to the exchanges."""
    return both(number, given=(f"q {number}", f"k {number}", f"v {number}"), **values)


def judged(*passes, **values):
    return findings(UnsplitSequence, shared(*passes, **values))


def test_ranks_that_bring_the_same_tokens_are_named():
    (finding,) = judged(same(0), same(1))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert "ranks 0-1 share sequences by all-to-all" in finding.message
    assert "in 2 of 2 passes" in finding.message
    assert finding.location.line == 30


@pytest.mark.parametrize(
    "passes",
    [
        [both(0), both(1)],
        [same(0)],
        [same(0), same(0)],
        [same(n, num_distinct=4) for n in (0, 1)],
        [both(n, given=("", "")) for n in (0, 1)],
    ],
    ids=["parts", "one pass", "one batch again and again", "tokens all alike", "unread"],
)
def test_parts_that_differ_or_say_nothing_are_silent(passes):
    assert not judged(*passes)


def test_positions_that_differ_do_not_hide_values_that_are_the_same():
    def mixed(number):
        return [
            passed(rank, number, use(rank, number, given=(f"q {rank}", f"v {number}")))
            for rank in (0, 1)
        ]

    (finding,) = judged(mixed(0), mixed(1))
    assert "1 of 2 tensors" in finding.evidence[0].summary


def test_each_ring_is_judged_by_itself():
    def rings(number):
        peers = {0: 1, 1: 0, 2: 3, 3: 2}
        return [
            passed(rank, number, how="ring", peer=peers[rank], members=(0, 1, 2, 3),
                   given=(f"kv {number}" if rank > 1 else f"kv {rank} {number}",))
            for rank in peers
        ]  # fmt: skip

    (finding,) = judged(rings(0), rings(1), how="ring")
    assert finding.ranks == RankSet([2, 3])


def test_messages_that_do_not_come_back_are_no_ring():
    def line(number):
        return [
            passed(rank, number, how="ring", peer=peer, given=(f"kv {number}",))
            for rank, peer in ((0, 1), (1, -1))
        ]

    assert judged(line(0), line(1), how="ring") == []
