"""Copies that drift apart are an alarm where nothing of their size passes between the ranks."""

from __future__ import annotations

import pytest

from distdiag.checks.shd.unreduced_gradient import UnreducedGradient
from distdiag.engine.models.aligner import ModelAligner
from distdiag.engine.models.models import Models
from distdiag.engine.models.replicas import FEWEST_STEPS, PATIENCE
from distdiag.events.collectives import GroupCreated, Signature
from distdiag.events.lifecycle import Finished, StepEnd
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.models import ReplicaView
from tests.checks.models import content, plan, plan_event, state_event
from tests.checks.streams import Job, event_of, plain_site
from tests.engine.aligned import aligned, broken

PAIR = (0, 1)


def samples(values, *, ranks=PAIR, names=("a", "b", "c"), **fields):
    """What each rank's gradients and parameters are in its first two steps: a number for each."""
    fields.setdefault("evidence", ReplicaEvidence.UNSYNCED)
    plans = [plan(name, replicas=tuple(ranks), **fields) for name in names]
    for rank in ranks:
        yield plan_event(rank, plans)
    for moment, step in (
        (Moment.START, 0),
        (Moment.GRADIENT, 0),
        (Moment.STEP, 0),
        (Moment.STEP, 1),
    ):
        for rank in ranks:
            held = values(rank, moment, step)
            yield state_event(rank, [held] * len(names), moment=moment, step=step)


def drifting(rank, moment, step):
    """Each rank's own gradients move what was the same."""
    return 0.1 + (rank if moment is Moment.GRADIENT or step else 0)


def only_gradients(rank, moment, step):
    """Each rank's gradients are its own, and the updates are not."""
    return 0.1 + (rank if moment is Moment.GRADIENT else 0)


def steps(number, ranks=PAIR):
    for step in range(number):
        for rank in ranks:
            yield event_of(StepEnd, rank, step=step, duration_s=0.1)


def ends(ranks=PAIR, status=0):
    return [event_of(Finished, rank, exit_status=status) for rank in ranks]


def call(number, step=2, *, ranks=PAIR, world=2, op="all_reduce", **sign):
    """One rank's call that carries so many float32."""
    job = Job(world)
    made = Signature(op, input_sizes=((number,),), dtypes=("float32",), **sign)
    group = job.group(ranks, f"group of {ranks}")
    return job.call(ranks[0], plain_site(9), group=group, sign=made, step=step)


def found(*events, world=2, ends=True):
    """The findings of unreduced gradients."""
    checks = [UnreducedGradient()]
    return aligned(ModelAligner, *events, world=range(world), checks=checks, ends=ends).findings


def test_ranks_that_never_exchange_anything_are_an_alarm_at_the_end():
    (finding,) = found(*samples(drifting), *steps(8), *ends())
    assert finding.severity is Severity.WARNING
    assert finding.grade is Grade.LIKELY
    assert finding.ranks == RankSet(PAIR)
    assert finding.subjects == ("a", "b", "c")
    assert "in 8 steps nothing as large was exchanged between them" in finding.message


def test_a_long_run_is_judged_while_it_trains():
    long = steps(PATIENCE[ReplicaEvidence.UNSYNCED])
    (finding,) = found(*samples(drifting), *long, ends=False)
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    "rest",
    [
        [*steps(8), call(32), *ends()],
        [*steps(8), call(16), call(16, op="broadcast"), *ends()],
        [*steps(8), *(call(1, step) for step in range(1, 49)), *ends()],
        [*steps(8), call(32, op="send", peer=1), *ends()],
        [*steps(FEWEST_STEPS - 1), *ends()],
        [*steps(8), *ends(status=1)],
        [*steps(8), *ends([0])],
        [
            broken(1, "collectives"),
            *steps(8),
            *ends(),
        ],
    ],
    ids=[
        "an average",
        "one of parts",
        "a stream of small parts",
        "messages",
        "a short run",
        "a run that failed",
        "a run that was cut off",
        "calls that were not seen",
    ],
)
def test_it_stays_a_note_after(rest):
    (finding,) = found(*samples(drifting), *rest)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "small",
    [call(1), call(32, op="gather", root=0), call(32, ranks=(0,))],
    ids=["a metric", "what one rank gets", "what one rank keeps"],
)
def test_nobody_is_brought_together_by(small):
    (finding,) = found(*samples(drifting), small, *steps(8), *ends())
    assert finding.severity is Severity.WARNING


def test_an_average_counts_though_it_is_reported_before_what_the_models_hold():
    (finding,) = found(call(64), *samples(drifting), *steps(8), *ends())
    assert finding.severity is Severity.INFO


def test_gradients_that_differ_and_lead_to_equal_updates_stay_a_note():
    (finding,) = found(*samples(only_gradients), *steps(8), *ends())
    assert finding.severity is Severity.INFO


def test_ranks_that_never_were_alike_stay_a_note():
    (finding,) = found(*samples(lambda rank, *_: 0.1 + rank), *steps(8), *ends())
    assert finding.severity is Severity.INFO


# Groups that were made beside one another

REDUCING, OWN = (0, 2), (1, 3)
FOUR = range(4)


def groups(*parts, desc="mesh_dp", world=4):
    """All ranks create these groups, one after the other."""
    made = {"api": "new_group", "scope": tuple(range(world)), "generation": 0}
    made["site"] = plain_site(5)
    for ordinal, ranks in enumerate(parts):
        for rank in range(world):
            yield event_of(GroupCreated, rank, ordinal=ordinal, ranks=ranks, desc=desc, **made)


def stages(values=drifting, **fields):
    """Ranks 0 and 2 keep a stage whose gradients they reduce; 1 and 3 keep another one."""
    fields = {"evidence": ReplicaEvidence.WORLD, "wrapper": "", **fields}
    yield from samples(lambda *_: 0.1, ranks=REDUCING, names=("first",), **fields)
    yield from samples(values, ranks=OWN, names=("second", "third"), **fields)


REDUCED = [call(128, 0, ranks=REDUCING, world=4)]


@pytest.mark.parametrize(
    "split",
    [[*groups(REDUCING, OWN)], [*groups((0, 2, 1, 3))]],
    ids=["group by group", "all at once"],
)
def test_a_stage_that_does_not_reduce_beside_one_that_does_is_an_alarm(split):
    (finding,) = found(*split, *REDUCED, *stages(), *steps(8, FOUR), *ends(FOUR), world=4)
    assert finding.severity is Severity.WARNING
    assert finding.ranks == RankSet(OWN)
    assert finding.subjects == ("second", "third")
    assert "reduce their gradients" in finding.evidence[-1].summary


@pytest.mark.parametrize(
    "events",
    [
        [*groups(REDUCING, OWN), *stages()],
        [*groups(REDUCING, (1,), (3,)), *REDUCED, *stages()],
        [*groups(REDUCING, desc="leaders"), *groups(OWN, desc="rest"), *REDUCED, *stages()],
        [*groups(REDUCING, OWN), *REDUCED, *stages(), call(64, ranks=OWN, world=4)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(requires_grad=False)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(lambda *_: 0.3)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(lambda rank, *_: 0.1 + rank)],
        [*groups(REDUCING, OWN), *REDUCED, *stages(only_gradients)],
    ],
    ids=[
        "nobody reduces",
        "the others are alone",
        "groups for other ends",
        "averages of their own",
        "a frozen stage",
        "reduced in another way",
        "experts of each rank",
        "equal updates",
    ],
)
def test_stages_are_silent_where(events):
    assert not found(*events, *steps(8, FOUR), *ends(FOUR), world=4)


# Biases and routers that are known by what ranks train together beside them


NONE = {"wrapper": "", "evidence": ReplicaEvidence.WORLD}
PART = {"wrapper": "", "evidence": ReplicaEvidence.OWN}
BIAS = {
    **NONE,
    "shape": (4,),
    "is_parameter": False,
    "requires_grad": False,
    "is_routing_bias": True,
}


def moved(value):
    """A weight that training has changed, and not by a factor alone."""
    return content(value, least=-1.0, greatest=1.0 + value)


def views(plans, *held_by_step, ranks=(0, 1)):
    """What routers show of what rank 0, 1, … hold when they start, and at each step."""
    models = Models()
    events = [plan_event(rank, plans) for rank in ranks]
    for step, held in enumerate(held_by_step):
        fields = {"moment": Moment.STEP if step else Moment.START, "step": step}
        events += [state_event(rank, held[rank], **fields) for rank in ranks]
    found = [view for event in events for view in models.feed(event)]
    reported = (ReplicaEvidence.ROUTER, ReplicaEvidence.LAYER)
    return [v for v in found if isinstance(v, ReplicaView) and v.evidence in reported]


# Biases


def biased(ranks=(0, 1), **values):
    bias = plan("moe.expert_bias", replicas=ranks, **BIAS | values)
    return [plan("moe.gate.weight", replicas=ranks, **NONE), bias]


def test_a_bias_is_compared_where_the_router_stays_the_same_while_it_is_trained():
    held = [[moved(0.1), 0.0]] * 2, [[moved(0.3), 0.1], [moved(0.3), 0.2]]
    (view,) = views(biased(), *held)
    assert [tensor.plan.name for tensor in view.tensors] == ["moe.expert_bias"]
    assert (view.evidence, view.ranks, view.alike_at) == (
        ReplicaEvidence.ROUTER,
        RankSet([0, 1]),
        0,
    )


def test_it_is_reported_once():
    later = [[moved(0.3), 0.1], [moved(0.3), 0.2]]
    assert len(views(biased(), [[moved(0.1), 0.0]] * 2, later, later)) == 1


def test_ranks_that_train_one_router_are_compared_apart_from_others():
    start = [[moved(0.1), 0.0]] * 4
    held = [[moved(w), b] for w, b in ((0.3, 0.1), (0.3, 0.1), (0.4, 0.2), (0.4, 0.3))]
    (view,) = views(biased((0, 1, 2, 3)), start, held, ranks=(0, 1, 2, 3))
    assert view.ranks == RankSet([2, 3])


@pytest.mark.parametrize(
    ("start", "after"),
    [
        ([(0.1, 0.0)] * 2, [(0.1, 0.1), (0.1, 0.2)]),
        ([(0.1, 0.0)] * 2, [(0.3, 0.1), (0.4, 0.2)]),
        ([(0.1, 0.0)] * 2, [(0.3, 0.1), (0.3, 0.1)]),
        ([(0.1, 0.5), (0.1, 0.6)], [(0.3, 0.1), (0.3, 0.2)]),
    ],
    ids=["not trained", "each for itself", "equal biases", "never alike"],
)
def test_other_biases_are_not(start, after):
    held = [[[moved(weight), bias] for weight, bias in each] for each in (start, after)]
    assert not views(biased(), *held)


def test_a_router_that_merely_decays_tells_nothing():
    held = (
        [[content(0.5, least=-1.0, greatest=2.0), 0.0]] * 2,
        [[content(0.45, least=-0.9, greatest=1.8), bias] for bias in (0.1, 0.2)],
    )
    assert not views(biased(), *held)


def test_a_bias_whose_ranks_are_known_is_left_to_what_tells_them():
    held = [[moved(0.1), 0.0]] * 2, [[moved(0.3), 0.1], [moved(0.3), 0.2]]
    assert not views(biased(evidence=ReplicaEvidence.REDUCED), *held)


# Routers

NAMES = ("0.norm.weight", "0.moe.gate.weight", "0.moe.experts.0.weight", "0.moe.experts.1.weight")


def block(names=NAMES, num_experts=4, **values):
    """Experts of this rank with their marks, and a router that has one, too."""
    kinds = [{"replicas": (0, 1), **NONE}, PART | values, PART, PART]
    shapes = [(8,), (num_experts, 8), (8, 8), (8, 8)]
    return [
        plan(name, shape=shape, **kind)
        for name, shape, kind in zip(names, shapes, kinds, strict=True)
    ]


def held(norm, router, expert=(0.5, 0.6)):
    return [[moved(norm[r]), moved(router[r]), moved(expert[r]), moved(expert[r])] for r in (0, 1)]


START = held((0.1, 0.1), (0.2, 0.2))
DRIFTED = held((0.3, 0.3), (0.4, 0.5))


def test_a_router_that_is_marked_as_a_part_is_compared_where_the_rest_of_its_layer_is_shared():
    (view,) = views(block(), START, DRIFTED)
    assert [tensor.plan.name for tensor in view.tensors] == ["0.moe.gate.weight"]
    assert (view.evidence, view.ranks, view.alike_at) == (ReplicaEvidence.LAYER, RankSet([0, 1]), 0)


@pytest.mark.parametrize(
    ("start", "after"),
    [
        (held((0.1, 0.1), (0.2, 0.3)), DRIFTED),
        (START, held((0.3, 0.4), (0.4, 0.5))),
        (START, held((0.1, 0.1), (0.4, 0.5))),
        (START, held((0.3, 0.3), (0.4, 0.4))),
    ],
    ids=["never alike", "each for itself", "the rest is not trained", "not drifted"],
)
def test_routers_that_may_be_parts_are_not(start, after):
    assert not views(block(), start, after)


def test_a_router_of_the_experts_of_one_rank_may_be_a_part_of_it():
    assert not views(block(num_experts=2), START, DRIFTED)


def test_who_trains_other_parts_for_itself_may_mean_the_router_too():
    names = ("0.norm.weight", "0.moe.gate.weight", "0.moe.experts.0.weight", "0.head.weight")
    assert not views(block(names), START, DRIFTED)


def test_experts_in_a_list_of_their_own_are_those_of_the_layer_around_it():
    names = [name.replace("experts.", "experts.local_experts.") for name in NAMES]
    assert len(views(block(names), START, DRIFTED)) == 1


def test_parts_of_a_router_are_not_compared():
    assert not views(block(evidence=ReplicaEvidence.WRAPPER), START, DRIFTED)
