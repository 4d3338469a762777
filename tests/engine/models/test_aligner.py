"""From the events of models to the findings of the checks that judge them."""

from __future__ import annotations

import pytest

from distdiag.checks import load_checks
from distdiag.engine.aligner import LIGHT
from distdiag.engine.losses.losses import LossAligner
from distdiag.engine.models.aligner import ModelAligner, RandomStreams, SliceSaves
from distdiag.events.base import Event
from distdiag.events.models import Moment, ReplicaEvidence, SliceSaved
from distdiag.events.ranks import RankSet
from distdiag.views.alignment import OptimizerView, RandomView, SliceSaveView
from distdiag.views.base import View
from distdiag.views.models import (
    ContentView,
    EvaluationReplicas,
    GradientReplicas,
    ModelView,
    ScalingView,
    StartReplicas,
    StepReplicas,
    UntrainedView,
)
from tests.checks.models import (
    ZEROS,
    content,
    mesh,
    optimizer_state,
    plan,
    plan_event,
    state_event,
)
from tests.checks.rep.test_rng_mismatch import PAIR, draw, state
from tests.checks.streams import event_of, plain_site
from tests.engine.aligned import aligned, broken
from tests.engine.models.copies import copies

CHECKS = load_checks()
OF_STEPS = {
    *(GradientReplicas, StepReplicas, EvaluationReplicas),
    *(OptimizerView, UntrainedView, ScalingView),
}
NO_COPIES = "no two ranks hold a tensor that should be the same"


def watched(*events: Event, ends: bool = True) -> dict[str, list[int]]:
    """The culprits by the code of each finding."""
    checks = [check() for check in CHECKS.values()]
    found = aligned(ModelAligner, *events, checks=checks, ends=ends).findings
    return {finding.code: list(finding.ranks) for finding in found}


def of_both(tell, *values, **more):
    return [tell(rank, value, **more) for rank, value in zip(PAIR, values, strict=True)]


PLANS = of_both(plan_event, copies(), copies())
ALIKE = of_both(state_event, (0.1, 0.2), (0.1, 0.2))


def test_a_healthy_run_is_silent():
    step = of_both(state_event, (0.3, 0.2), (0.3, 0.2), moment=Moment.STEP)
    assert not watched(*PLANS, *ALIKE, *step, *[optimizer_state(r, members=PAIR) for r in PAIR])


def test_plans_that_differ():
    assert watched(*of_both(plan_event, copies(), copies(dtype="float16"))) == {"SHD002": [0, 1]}


@pytest.mark.parametrize(
    ("held", "code"), [((0.1, 0.3), "REP001"), ((0.1, ZEROS), "REP002")], ids=["other", "zeros"]
)
def test_copies_that_differ_from_the_start(held, code):
    assert code in watched(*PLANS, *of_both(state_event, (0.1, 0.2), held))


def test_copies_that_part():
    step = of_both(state_event, (0.1, 0.2), (0.1, 0.4), moment=Moment.STEP, step=2)
    assert watched(*PLANS, *ALIKE, *step) == {"REP003": [0, 1]}


def test_gradients_that_differ():
    plans = [
        plan(
            "w",
            wrapper="",
            placements=("R",),
            replicas=PAIR,
            mesh=mesh(2),
            evidence=ReplicaEvidence.MESH,
        )
    ]
    gradients = of_both(state_event, (0.1,), (0.4,), moment=Moment.GRADIENT)
    assert watched(*of_both(plan_event, plans, plans), *gradients) == {"SHD004": [0, 1]}


def test_gradients_that_are_scaled_differently():
    plans = [
        [
            plan(
                "w",
                placements=("S(0)",),
                replicas=(rank,),
                mesh=mesh(2),
                evidence=ReplicaEvidence.MESH,
            )
        ]
        for rank in PAIR
    ]
    before, after = content(2.0), content(1.0, least=0.5, greatest=1.5)
    events = [
        *of_both(state_event, (before,), (before,), moment=Moment.BACKWARD),
        *of_both(state_event, (before,), (after,), moment=Moment.GRADIENT),
    ]
    assert watched(*of_both(plan_event, *plans), *events) == {"SHD006": [0, 1]}


def test_optimizers_that_differ():
    rates = {0: (0.1,), 1: (0.2,)}
    together = [optimizer_state(r, learning_rates=rates[r], members=PAIR) for r in PAIR]
    assert watched(*together) == {"REP004": [0, 1]}
    apart = [optimizer_state(r, learning_rates=rates[r]) for r in PAIR]
    assert not watched(*apart)


def test_an_optimizer_that_only_one_rank_has_is_judged_at_the_end():
    empty = optimizer_state(0, num_without_gradient=4, num_gradients=0)
    assert not watched(empty, ends=False)
    assert watched(empty) == {"SHD005": [0]}


def test_a_save_that_only_one_rank_makes_is_judged_at_the_end():
    assert not watched(saved(0, "w"), ends=False)
    assert watched(saved(0, "w")) == {"CKP002": [1]}


def gaps(*events: Event, **options: bool) -> dict[type[View | Event], str]:
    """Why the views of models, but for losses, were not built."""
    found = aligned(ModelAligner, *events, **options).gaps
    return {view: gap.reason for view, gap in found.items() if view not in LossAligner.builds}


ALL = {*ModelAligner.builds} - {*LossAligner.builds}


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "no model was seen"),
        ([*PLANS, broken(1, "models")], "the models of rank 1 are not observed wholly"),
    ],
)
def test_where_models_were_not_seen_no_check_of_them_claims_to_have_looked(events, reason):
    assert gaps(*events) == dict.fromkeys(ALL, reason)


def test_the_light_profile_leaves_the_steps_out_and_nothing_else():
    found = gaps(*PLANS, *ALIKE, only_start=True)
    assert {view for view, reason in found.items() if reason == LIGHT.reason} == OF_STEPS
    assert not {ModelView, ContentView, StartReplicas, SliceSaveView} & found.keys()


def test_what_was_compared_counts_as_checked():
    gradients = of_both(state_event, (0.3, 0.2), (0.3, 0.2), moment=Moment.GRADIENT)
    step = of_both(state_event, (0.3, 0.2), (0.3, 0.2), moment=Moment.STEP)
    reported = [*PLANS, *ALIKE, *gradients, *step]
    found = gaps(*reported)
    unseen = {OptimizerView, UntrainedView, ScalingView, EvaluationReplicas}
    assert OF_STEPS & found.keys() == unseen
    assert found[OptimizerView] == "no step of a model was compared"
    both = gaps(*reported, *[optimizer_state(rank, members=PAIR) for rank in PAIR])
    assert found.keys() - both.keys() == {OptimizerView, UntrainedView}


def test_one_rank_alone_has_nothing_to_compare():
    found = gaps(plan_event(0, copies((0,))), state_event(0, (0.1, 0.2)))
    assert found[ModelView] == "nothing tells which ranks keep a model together"
    assert found[StartReplicas] == NO_COPIES


def test_a_model_that_is_wholly_sharded_has_no_copies_to_compare():
    sharded = [
        [
            plan(
                "w",
                placements=("S(0)",),
                replicas=(rank,),
                mesh=mesh(2),
                evidence=ReplicaEvidence.MESH,
            )
        ]
        for rank in PAIR
    ]
    states = [
        event
        for moment in (Moment.START, Moment.GRADIENT, Moment.STEP)
        for event in of_both(state_event, (0.1,), (0.2,), moment=moment)
    ]
    found = gaps(*of_both(plan_event, *sharded), *states)
    assert ModelView not in found
    assert {found[each] for each in (StartReplicas, StepReplicas, GradientReplicas)} == {NO_COPIES}


def test_random_states_are_checked_only_where_ranks_should_draw_the_same():
    assert gaps()[RandomView] == "no model was seen"
    assert gaps(draw(0, "a"))[RandomView] == "no two ranks draw where they should draw the same"
    assert RandomView not in gaps(draw(0, "a"), draw(1, "a"))


# Saves of parts of sharded parameters


def saved(rank, *names, members=(0, 1), step=0):
    fields = {"names": names, "members": members, "site": plain_site(60)}
    return event_of(SliceSaved, rank, step=step, **fields)


def incomplete(*events):
    saves = SliceSaves()
    for event in events:
        saves.add(event)
    return list(saves.incomplete())


def test_a_save_of_one_rank_is_incomplete():
    (save,) = incomplete(saved(0, "w"))
    assert (save.kind, save.key) == ("save", ("w",))
    assert save.present_ranks == RankSet([0])
    assert save.missing_ranks == RankSet([1])


def test_a_save_of_all_ranks_at_any_time_is_complete():
    assert not incomplete(saved(0, "w", step=3), saved(1, "w", step=90))


def test_the_first_of_many_saves_is_shown():
    (save,) = incomplete(saved(0, "w", step=3), saved(0, "w", step=6))
    assert save.any_event.step == 3


def test_a_tensor_with_too_few_rows_for_all_ranks_is_saved_all_the_same():
    assert not incomplete(saved(0, "w", "bias_of_one"), saved(1, "w"))


# States of generators


def fed(*events):
    streams = RandomStreams()
    return [found for event in events for found in streams.add(event)]


def test_a_draw_is_shown_when_all_ranks_of_the_mesh_have_reported_it():
    assert not fed(draw(0, "a"))
    (found,) = fed(draw(0, "a"), draw(1, "b"))
    assert {rank: event.digest for rank, event in found.by_rank.items()} == {0: "a", 1: "b"}


def test_draws_on_other_meshes_are_not_mixed():
    assert not fed(draw(0, "a"), draw(1, "b", members=(1, 2)))


def test_the_same_moment_may_come_again():
    start = Moment.START
    first = [state(rank, start, cpu="a") for rank in PAIR]
    second = [state(rank, start, cpu="b") for rank in PAIR]
    assert len(fed(first[0], second[0], first[1], second[1])) == 2


def test_ranks_that_share_nothing_are_not_compared():
    assert not fed(draw(0, "a", members=()), draw(1, "b", members=()))
