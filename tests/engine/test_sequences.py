"""Which groups that share sequences are shown, and what is known of them then."""

import math
from itertools import count

import msgspec
import pytest

from distdiag.checks.seq.lost_or_duplicated_token import LostOrDuplicatedToken
from distdiag.engine.aligner import NothingThere
from distdiag.engine.sequences import NOT_ASKED, FirstSamples, SequenceAligner, TokenTraceAligner
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import ProcessGroup, Signature
from distdiag.events.gradients import GradientSum, GradientSums
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import AttentionUnread, SequenceUnverified
from distdiag.views.alignment import TokenTraceView
from distdiag.views.sequences import ModelEquality, SequenceView
from tests.checks.feeds import model_fed
from tests.checks.losses import mean, reported
from tests.checks.sequences import both, passed
from tests.checks.streams import Job, plain_site
from tests.checks.token_traces import HALVES, token_traces
from tests.engine.aligned import aligned, broken

WORLD = range(4)
_SEQS = count(1000)


def shared(*events):
    """What comes of events before the end of the run."""
    return aligned(SequenceAligner, *events, world=WORLD, ends=False)


def call(rank, op, sizes, ranks, dtype="float32", *, seq=None, **values):
    group = ProcessGroup("0", "", tuple(ranks), "gloo", 0)
    sign = Signature(op, input_sizes=(sizes,), dtypes=(dtype,))
    made = Job(4).call(rank, plain_site(5), group=group, sign=sign, **values)
    return msgspec.structs.replace(made, seq=next(_SEQS) if seq is None else seq)


def test_a_group_is_shown_when_all_its_ranks_have_reported():
    one, other = (passed(rank, 0, members=(2, 3)) for rank in (2, 3))
    assert not shared(one).views
    ((view,), _, _) = shared(one, other)
    assert view.ranks == RankSet([2, 3])


def test_groups_are_kept_apart():
    views = shared(*[passed(r, 0, members=(0, 1) if r < 2 else (2, 3)) for r in WORLD]).views
    assert [view.ranks for view in views] == [RankSet([0, 1]), RankSet([2, 3])]


@pytest.mark.parametrize(
    ("sent", "is_fed_by_others"),
    [
        (("broadcast", (2, 16), (0, 1), "int64"), True),
        (("all_reduce", (1,), (0, 1), "int64"), False),
        (("all_to_all_single", (2, 16), (0, 1)), False),
    ],
    ids=["samples", "counts", "activations"],
)
def test_only_samples_that_are_sent_before_the_model_feed_it(sent, is_fed_by_others):
    feeds = [model_fed(rank, 0, since=3, begin=8, end=20) for rank in (0, 1)]
    views = shared(call(0, *sent, seq=5), *feeds, *both(0)).views
    assert len(views[-1].feeds) == 1
    assert views[-1].is_fed_by_others is is_fed_by_others


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
def test_only_large_sums_over_the_group_after_the_first_step_count(ranks, size, step, is_reduced):
    events = [call(0, "all_reduce", (size,), ranks, step=step)]
    for number in range(3):
        events += [reported(rank, [mean(8)], step=number) for rank in (0, 1)] + both(number)
    assert shared(*events).views[-1].is_reduced is is_reduced


def test_nothing_is_said_of_sums_before_there_were_some_steps():
    losses = [reported(rank, [mean(8)]) for rank in (0, 1)]
    assert shared(*losses, *both(0)).views[-1].is_reduced


def test_a_run_without_shared_sequences_says_so():
    gap = shared().gaps[SequenceView]
    assert isinstance(gap, NothingThere)
    assert "no exchange between ranks was seen" in gap.reason


@pytest.mark.parametrize("probe", ["sequence", "collectives", "functional-collectives"])
def test_a_rank_that_is_not_observed_wholly_is_named(probe):
    assert not shared(*both(0)).why(SequenceView)
    found = shared(*both(0), broken(1, probe))
    assert "the exchanges of rank 1" in found.why(SequenceView)


def test_calls_of_attention_that_were_not_read_are_said():
    unread = {"step": 0, "seq": 0, "time_ns": 0, "reason": "RuntimeError: no sizes"}
    numbers = ((0, 1), (0, 2), (3, 1))
    found = shared(*[AttentionUnread(rank=rank, number=n, **unread) for rank, n in numbers])
    why = "3 calls of attention on ranks 0,3 could not be read: RuntimeError: no sizes"
    assert found.why(SequenceView) == why


def test_exchanges_in_compiled_code_are_reported_where_nothing_was_seen():
    site = CallSite((Frame("<eval_with_key>.7", 9, "forward", user=False),))
    ops = ("all_to_all_single", "all_reduce")
    calls = [call(rank, op, (2, 8), (0, 1)) for rank in (0, 1) for op in ops]
    found = shared(*[msgspec.structs.replace(each, site=site) for each in calls])
    assert "ranks 0-1 exchange in compiled code" in found.why(SequenceView)


# Numbered tokens


def traced(events):
    found = aligned(TokenTraceAligner, *events, world=WORLD, checks=[LostOrDuplicatedToken()])
    return found.findings, found.why(TokenTraceView)


def on_ranks(parts, ranks):
    events = token_traces(parts).by_rank.values()
    return [
        msgspec.structs.replace(event, rank=rank, members=ranks)
        for rank, event in zip(ranks, events, strict=True)
    ]


def test_each_group_is_judged_by_itself():
    good, bad = on_ranks(HALVES, (0, 1)), on_ranks([range(1, 5), range(4, 8)], (2, 3))
    findings, gap = traced([bad[1], *good, bad[0]])
    assert {finding.ranks for finding in findings} == {RankSet([2])}
    assert not gap


def test_a_group_of_which_ranks_are_silent_is_not_judged():
    assert traced(on_ranks(HALVES, (0, 1))[:1]) == (
        (),
        "only rank 0 reported what became of the tokens",
    )


def test_without_any_token_trace_it_says_how_to_get_one():
    assert traced([]) == ((), NOT_ASKED.reason)


def test_ranks_that_disagree_about_the_group_are_not_compared():
    events = on_ranks(HALVES, (0, 1))
    events[0] = msgspec.structs.replace(events[0], members=(0, 2))
    assert traced(events)[0] == ()


def test_what_a_library_has_and_was_not_verified_is_reported():
    unverified = SequenceUnverified(rank=0, seq=1, time_ns=0, name="lib:split", reason="no group")
    assert traced([unverified, *on_ranks(HALVES, (0, 1))]) == ((), "lib:split: no group")


# Whether ranks have the same model when they begin to train


def sampled(rank, weights, *, step=0, size=8, members=()):
    gradients = tuple(
        GradientSum(name, size, members, len(members), weight, ((1.0,),), (1.0,), (), (1.0,), 0.0)
        for name, weight in weights.items()
    )
    fields = {"seq": 0, "time_ns": 0, "nodes": (), "site": plain_site(3)}
    return GradientSums(rank=rank, step=step, model="Model", gradients=gradients, **fields)


@pytest.mark.parametrize(
    ("events", "equality"),
    [
        ([sampled(r, {"a": 1.0, "b": 2.0}) for r in (0, 1)], ModelEquality.EQUAL),
        ([sampled(r, {"a": 1.0, "b": 2.0, "c": 3.0 + r}) for r in (0, 1)], ModelEquality.EQUAL),
        ([sampled(r, {"a": 1.0 + r}) for r in (0, 1)], ModelEquality.OTHER_VALUES),
        (
            [*(sampled(r, {"a": 1.0}) for r in (0, 1)), sampled(1, {"a": 2.0}, step=1)],
            ModelEquality.EQUAL,
        ),
        ([sampled(r, {"ab"[r]: 1.0}) for r in (0, 1)], ModelEquality.OTHER_MODELS),
        ([sampled(r, {"a": 1.0}, size=8 + r) for r in (0, 1)], ModelEquality.OTHER_MODELS),
        ([sampled(0, {"a": 1.0})], ModelEquality.UNKNOWN),
        ([sampled(r, {"a": 1.0 + r}, step=r) for r in (0, 1)], ModelEquality.UNKNOWN),
        ([sampled(r, {"a": 1.0 + r}, members=(0, 1)) for r in (0, 1)], ModelEquality.EQUAL),
        ([sampled(r, {"a": (math.nan, 2.0)[r]}) for r in (0, 1)], ModelEquality.EQUAL),
    ],
    ids=[
        "the same weights",
        "a part of its own",
        "other weights",
        "other weights later",
        "other names",
        "other sizes",
        "one rank",
        "other steps",
        "shards",
        "what could not be read",
    ],
)
def test_how_alike_the_models_of_two_ranks_are(events, equality):
    samples = FirstSamples()
    for event in events:
        samples.feed(event)
    assert samples.equality((0, 1)) is equality
