"""What ranks do with each gradient is known from what was given and what is applied."""

import msgspec
import pytest

from distdiag.engine.aligner import LIGHT
from distdiag.engine.losses.gradients import GradientAligner
from distdiag.engine.losses.sums import FEWEST_STEPS
from distdiag.events.collectives import Signature
from distdiag.events.lifecycle import StepEnd
from distdiag.events.models import ReplicaEvidence
from distdiag.views.contributions import ContributionView
from distdiag.views.gradients import GradientView, Sum, SumsView
from tests.checks.contributions import Mix, events_of
from tests.checks.gradients import sample
from tests.checks.models import plan, plan_event
from tests.checks.streams import Job, event_of, plain_site
from tests.engine.aligned import aligned, broken

PAIR = (0, 1)
SUMMED = tuple(f"layers.{n}.weight" for n in range(4))
JOB = Job(2)
MEAN = Mix({(rank, 0): 0.5 for rank in PAIR})


def plans(rank):
    """What is known of the tensors: a wrapper keeps one of them alike."""
    evidence = dict.fromkeys((*SUMMED, "own", "unused"), ReplicaEvidence.WORLD)
    evidence["kept"] = ReplicaEvidence.WRAPPER
    known = [plan(name, evidence=e, owners=("SGD",)) for name, e in evidence.items()]
    return plan_event(rank, known)


def trained(steps=(0, 1, 2), ranks=PAIR):
    """Two ranks that average all gradients but one, whose copies drift apart."""
    yield from map(plans, PAIR)
    for step in steps:
        for rank in ranks:
            own = Mix({(rank, 0): 1.0}, weight=0.5 + (0.1 * rank if step else 0.0))
            mixes = dict.fromkeys((*SUMMED, "kept"), MEAN) | {"own": own}
            yield events_of(rank, step, mixes)


def call(size=64, step=1):
    sign = Signature("all_reduce", input_sizes=((size,),), dtypes=("float32",))
    return JOB.call(0, plain_site(9), sign=sign, step=step)


def steps(number):
    return [
        event_of(StepEnd, rank, step=step, duration_s=0.1)
        for step in range(number)
        for rank in PAIR
    ]


def shown(*events, ends=True):
    found = aligned(GradientAligner, *events, ends=ends)
    return [view for view in found.views if isinstance(view, SumsView)], found.why(SumsView)


def test_what_is_done_with_each_gradient():
    (view,), gap = shown(*trained(), *steps(FEWEST_STEPS))
    assert not gap
    assert view.ranks == PAIR
    assert view.sums == dict.fromkeys(SUMMED, (Sum.SUMMED,) * 3) | {"own": (Sum.OWN,) * 3}
    assert view.drifted == {"own"}
    assert not view.has_shards
    assert not view.is_more_sent
    assert view.plans["own"].owners == ("SGD",)


def test_a_long_run_is_judged_while_it_trains():
    assert not shown(*trained(), *steps(100), ends=False)[0]
    (view,), _ = shown(*trained((0, 1, 2, 100)), *steps(100), ends=False)
    assert len(view.sums["own"]) == 4


@pytest.mark.parametrize(("size", "is_more"), [(64, False), (95, False), (96, True)])
def test_a_later_step_that_sends_more_is_noticed(size, is_more):
    more = [call(size, step=5)]
    (view,), _ = shown(*trained(), call(step=1), call(step=2), *more, *steps(FEWEST_STEPS))
    assert view.is_more_sent is is_more


@pytest.mark.parametrize(
    "events",
    [
        [*trained(), *steps(FEWEST_STEPS - 1)],
        [*trained(ranks=(0,)), *steps(FEWEST_STEPS)],
        [*map(plans, PAIR), *steps(FEWEST_STEPS)],
    ],
    ids=["a short run", "one rank alone has told", "no gradient"],
)
def test_nothing_is_judged_of(events):
    assert not shown(*events)[0]


def test_what_was_applied_before_and_is_left_is_noticed():
    events = [events_of(rank, 0, dict.fromkeys(SUMMED, MEAN)) for rank in PAIR]
    before = {each.name: each.applied for each in events[0].gradients}
    for rank in PAIR:
        mixes = {n: with_left(MEAN, left=tuple(2 * v for v in before[n])) for n in SUMMED}
        events.append(events_of(rank, 1, mixes))
    found = aligned(GradientAligner, *events)
    view = [each for each in found.views if isinstance(each, ContributionView)][-1]
    assert view.stale == {1}


def with_left(mix, left):
    return Mix(mix.coefficients, left=left)


# Gradients beside all-to-alls


def issued(rank, seq, op):
    call = JOB.call(rank, plain_site(3), sign=Signature(op, ((4,),)))
    return msgspec.structs.replace(call, seq=seq)


def gradients(*events, ends=True, **options):
    return aligned(GradientAligner, *events, ends=ends, **options)


def sums(rank):
    return sample(0, 2.0, 1.0).by_rank[rank]


def test_a_step_is_shown_when_all_ranks_have_reported():
    events = [issued(0, 11, "all_to_all_single"), issued(0, 3, "all_reduce"), sums(0)]
    assert not gradients(*events, ends=False).views
    (view, *_), gaps, _ = gradients(*events, sums(1), ends=False)
    (one,) = view.samples
    assert one.exchanges[0] == ((), (0, 1), ())
    assert one.exchanges[1] == ((), (), ())
    assert one.groups == frozenset({(0, 1)})
    assert GradientView not in gaps


def test_what_not_all_ranks_have_reported_is_shown_at_the_end():
    (view,), _, _ = gradients(sums(1))
    assert list(view.ranks) == [1]


def test_it_is_reported_when_nothing_was_exchanged_or_a_rank_is_blind():
    events = [sums(0), sums(1)]
    assert "all-to-all" in gradients(*events).why(GradientView)
    assert "rank 1" in gradients(*events, broken(1, "gradient-sums")).why(GradientView)
    assert gradients(only_start=True).gaps[GradientView] is LIGHT
