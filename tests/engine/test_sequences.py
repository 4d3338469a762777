"""Which groups are judged, and what is known of them then."""

from itertools import count

import msgspec
import pytest

from distdiag.checks.base import Check
from distdiag.engine.runner import Judges
from distdiag.engine.sequences import SequenceUses
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import AttentionUnread, SequenceUse
from distdiag.findings.finding import Severity
from tests.checks.feeds import model_fed
from tests.checks.losses import mean, told
from tests.checks.sequences import passed
from tests.checks.streams import plain_site

WORLD = RankSet(range(4))
_SEQS = count(1000)


class Keeping(Check):
    """Keeps the views that it is shown."""

    code, name, severity, needs = "XXX001", "keeping", Severity.ERROR, (SequenceUse,)

    def __init__(self):
        self.views = []

    def check_sequences(self, view):
        self.views.append(view)
        return iter(())


@pytest.fixture
def check():
    return Keeping()


@pytest.fixture
def watch(check):
    return SequenceUses(WORLD, Judges([check]))


def call(rank, op, sizes, ranks, dtype="float32", **values):
    return Collective(
        rank=rank,
        seq=values.get("seq", next(_SEQS)),
        time_ns=0,
        step=values.get("step", 1),
        group=ProcessGroup("0", "", tuple(ranks), "gloo", 0),
        collective_seq_id=1,
        signature=Signature(op, input_sizes=(sizes,), dtypes=(dtype,)),
        site=plain_site(5),
        is_async=False,
    )


def test_a_group_is_judged_when_all_its_ranks_have_told(watch, check):
    watch.feed(passed(2, 0, members=(2, 3)))
    assert check.views == []
    watch.feed(passed(3, 0, members=(2, 3)))
    (view,) = check.views
    assert view.ranks == RankSet([2, 3])


def test_groups_are_kept_apart(watch, check):
    for rank in range(4):
        watch.feed(passed(rank, 0, members=(0, 1) if rank < 2 else (2, 3)))
    assert [view.ranks for view in check.views] == [RankSet([0, 1]), RankSet([2, 3])]


def test_samples_that_are_sent_before_the_model_are_told(watch, check):
    watch.feed(call(0, "broadcast", (2, 16), (0, 1), "int64", seq=5))
    for rank in (0, 1):
        watch.feed(model_fed(rank, 0, since=3, begin=8, end=20))
        watch.feed(passed(rank, 0))
    assert check.views[-1].is_fed_by_others


def test_counts_that_are_added_up_are_no_samples(watch, check):
    watch.feed(call(0, "all_reduce", (1,), (0, 1), "int64", seq=5))
    for rank in (0, 1):
        watch.feed(model_fed(rank, 0, since=3, begin=8, end=20))
        watch.feed(passed(rank, 0))
    assert not check.views[-1].is_fed_by_others


def test_activations_that_are_sent_are_no_samples(watch, check):
    watch.feed(call(0, "all_to_all_single", (2, 16), (0, 1), seq=5))
    for rank in (0, 1):
        watch.feed(model_fed(rank, 0, since=3, begin=8, end=20))
        watch.feed(passed(rank, 0))
    assert len(check.views[-1].feeds) == 1
    assert not check.views[-1].is_fed_by_others


@pytest.mark.parametrize(
    ("ranks", "size", "step", "is_reduced"),
    [
        ((0, 1), 1000, 1, True),
        ((0, 1, 2, 3), 1000, 1, True),
        ((0, 2), 1000, 1, False),
        ((0, 1), 1, 1, False),
        ((0, 1), 1000, 0, False),
    ],
)
def test_only_large_sums_over_the_group_after_the_first_step_count(
    watch, check, ranks, size, step, is_reduced
):
    watch.feed(call(0, "all_reduce", (size,), ranks, step=step))
    for number in range(3):
        for rank in (0, 1):
            watch.feed(told(rank, [mean(8)], step=number))
            watch.feed(passed(rank, number))
    assert check.views[-1].is_reduced is is_reduced


def test_nothing_is_said_of_sums_before_there_were_some_steps(watch, check):
    for rank in (0, 1):
        watch.feed(told(rank, [mean(8)]))
        watch.feed(passed(rank, 0))
    assert check.views[-1].is_reduced


def test_a_run_without_shared_sequences_says_so(watch):
    assert "no exchange between ranks was seen" in watch.not_checked["XXX001"]


@pytest.mark.parametrize("probe", ["sequence", "collectives", "functional-collectives"])
def test_a_rank_that_is_not_observed_wholly_is_named(watch, probe):
    for rank in (0, 1):
        watch.feed(passed(rank, 0))
    assert not watch.not_checked
    watch.feed(ProbeDisabled(rank=1, seq=1, time_ns=0, probe=probe, reason="x"))
    assert "the exchanges of rank 1" in watch.not_checked["XXX001"]


def test_calls_of_attention_that_were_not_read_are_said(check):
    watch = SequenceUses(WORLD, Judges([check]))
    unread = {"step": 0, "seq": 0, "time_ns": 0, "reason": "RuntimeError: no sizes"}
    for rank, number in ((0, 1), (0, 2), (3, 1)):
        watch.feed(AttentionUnread(rank=rank, number=number, **unread))
    why = "3 calls of attention on ranks 0,3 could not be read: RuntimeError: no sizes"
    assert watch.not_checked == {"XXX001": why}


def test_exchanges_in_compiled_code_are_told_where_nothing_was_seen(watch):
    site = CallSite((Frame("<eval_with_key>.7", 9, "forward", user=False),))
    for rank in (0, 1):
        one = call(rank, "all_to_all_single", (2, 8), (0, 1))
        watch.feed(msgspec.structs.replace(one, site=site))
        watch.feed(msgspec.structs.replace(call(rank, "all_reduce", (8,), (0, 1)), site=site))
    assert "ranks 0-1 exchange in compiled code" in watch.not_checked["XXX001"]
