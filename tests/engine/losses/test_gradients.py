"""What ranks do with each gradient is known from what they hold around a backward pass."""

import msgspec
import pytest

from distdiag.engine.aligner import LIGHT
from distdiag.engine.losses.gradients import GradientAligner
from distdiag.engine.models.sums import FEWEST_STEPS, SumsAligner
from distdiag.events.collectives import Signature
from distdiag.events.lifecycle import StepEnd
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.views.gradients import GradientView, Sum, SumsView
from tests.checks.gradients import sample
from tests.checks.models import ZEROS, plan, plan_event, state_event
from tests.checks.streams import Job, event_of, plain_site
from tests.engine.aligned import aligned, broken

PAIR = (0, 1)
NAMES = ("summed", "sent", "own", "same", "shard", "unused", "kept")
JOB = Job(2)


def plans(moment):
    """What is known of the tensors: who reduced a gradient, is known when the optimizer steps."""
    for name in NAMES:
        evidence = {"kept": ReplicaEvidence.WRAPPER}.get(name, ReplicaEvidence.WORLD)
        if name == "sent" and moment in (Moment.GRADIENT, Moment.STEP):
            evidence = ReplicaEvidence.REDUCED
        owners = () if moment is Moment.START else ("SGD",)
        yield plan(name, evidence=evidence, wrapper="", replicas=PAIR, owners=owners)


def held(rank, moment, step):
    alone, together = 0.1 + 0.3 * rank + step, 0.7 + step
    has_moved = moment is Moment.STEP and step > 0
    gradients = {
        "summed": alone if moment is Moment.BACKWARD else together,
        "sent": together,
        "own": alone,
        "same": together,
        "shard": alone,
        "unused": ZEROS,
        "kept": alone,
    }
    weights = dict.fromkeys(NAMES, 0.5)
    weights |= {"own": alone} if has_moved else {}
    weights["shard"] = 0.5 + rank
    return list((gradients if moment in (Moment.BACKWARD, Moment.GRADIENT) else weights).values())


def samples(steps=(0, 1, 2)):
    yield from events(Moment.START, 0)
    for step in steps:
        for moment in (Moment.BACKWARD, Moment.GRADIENT, Moment.STEP):
            yield from events(moment, step)


def events(moment, step):
    for rank in PAIR:
        yield plan_event(rank, list(plans(moment)), moment=moment)
        yield state_event(rank, held(rank, moment, step), moment=moment, step=step)


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
    found = aligned(SumsAligner, *events, ends=ends)
    return found.views, found.why(SumsView)


def test_what_is_done_with_each_gradient():
    (view,), gap = shown(*samples(), call(), *steps(FEWEST_STEPS))
    assert not gap
    assert view.ranks == PAIR
    assert view.sums == {
        "summed": (Sum.SUMMED,) * 3,
        "sent": (Sum.SUMMED,) * 3,
        "own": (Sum.OWN,) * 3,
        "same": (Sum.OTHER,) * 3,
        "unused": (),
    }
    assert view.drifted == {"own"}
    assert view.has_shards
    assert not view.is_more_sent
    assert view.plans["own"].owners == ("SGD",)


def test_a_long_run_is_judged_while_it_trains():
    early = [*samples(), call(), *steps(100)]
    assert not shown(*early, ends=False)[0]
    later = [e for m in (Moment.GRADIENT, Moment.STEP) for e in events(m, 100)]
    (view,), _ = shown(*early, *later, ends=False)
    assert len(view.sums["own"]) == 4


@pytest.mark.parametrize(("size", "is_more"), [(64, False), (67, False), (72, True)])
def test_a_later_step_that_sends_more_is_noticed(size, is_more):
    more = [call(size, step=5)]
    (view,), _ = shown(*samples(), call(step=1), call(step=2), *more, *steps(FEWEST_STEPS))
    assert view.is_more_sent is is_more


@pytest.mark.parametrize(
    "events",
    [
        [*samples(), call(), *steps(FEWEST_STEPS - 1)],
        [*samples(), *steps(FEWEST_STEPS)],
        [
            *samples(),
            call(),
            *steps(FEWEST_STEPS),
            broken(1, "models"),
        ],
        [call(), *steps(FEWEST_STEPS)],
    ],
    ids=["a short run", "nothing is reduced", "what is not seen wholly", "no model"],
)
def test_nothing_is_judged_of(events):
    views, gap = shown(*events)
    assert not views
    assert gap


def test_a_rank_that_never_tells_leaves_its_groups_unjudged():
    events = [e for e in (*samples(), call(), *steps(FEWEST_STEPS)) if e.rank == 0]
    views, gap = shown(*events)
    assert not views
    assert gap


def test_a_rank_that_ends_early_is_judged_by_what_it_told():
    late = [e for m in (Moment.GRADIENT, Moment.STEP) for e in events(m, 100) if e.rank == 0]
    (view,), _ = shown(*samples(), call(), *steps(100), *late)
    assert view.sums["own"] == (Sum.OWN,) * 3


# Gradients beside all-to-alls


def issued(rank, seq, op):
    call = JOB.call(rank, plain_site(3), sign=Signature(op, ((4,),)))
    return msgspec.structs.replace(call, seq=seq)


def gradients(*events, ends=True, **options):
    return aligned(GradientAligner, *events, ends=ends, **options)


def sums(rank):
    return sample(0, 2.0, 1.0).by_rank[rank]


def test_a_step_is_shown_when_all_ranks_have_told():
    events = [issued(0, 11, "all_to_all_single"), issued(0, 3, "all_reduce"), sums(0)]
    assert not gradients(*events, ends=False).views
    (view,), gaps, _ = gradients(*events, sums(1), ends=False)
    (one,) = view.samples
    assert one.exchanges[0] == ((), (0, 1), ())
    assert one.exchanges[1] == ((), (), ())
    assert one.groups == frozenset({(0, 1)})
    assert not gaps


def test_what_not_all_ranks_have_told_is_shown_at_the_end():
    (view,), _, _ = gradients(sums(1))
    assert list(view.ranks) == [1]


def test_it_is_told_when_nothing_was_exchanged_or_a_rank_is_blind():
    events = [sums(0), sums(1)]
    assert "all-to-all" in gradients(*events).why(GradientView)
    assert "rank 1" in gradients(*events, broken(1, "gradient-sums")).why(GradientView)
    assert gradients(only_start=True).gaps[GradientView] is LIGHT
