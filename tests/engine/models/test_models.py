"""Plans and contents of models as ranks tell them, and the views that they make."""

from __future__ import annotations

import pytest

from distdiag.engine.models.models import MOST_OPEN, Models
from distdiag.engine.models.replicas import ParallelGroups
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.views.models import ContentView, Disagreement, ModelView, ReplicaView
from tests.checks.models import ALL_NAN, ZEROS, content, mesh, plan, plan_event, state_event
from tests.checks.streams import Job, signature
from tests.engine.models.copies import LATE, all_fed, copies, fed, reported, states

# Plans


def test_plans_are_shown_when_the_last_rank_has_reported_its_own():
    plans = copies((0, 1, 2))
    events = [plan_event(rank, plans) for rank in (2, 0, 1)]
    models = Models()
    assert not fed(models, *events[:2])
    (view,) = fed(models, events[2])
    assert isinstance(view, ModelView)
    assert view.ranks == RankSet([0, 1, 2])
    assert view.by_rank[1] == tuple(plans)
    assert view.sites[2].location.line == 12


def test_plans_in_parts_are_put_together():
    plans = copies(names="abcde")
    parts = [
        plan_event(rank, plans[first : first + 2], first=first, total=5)
        for first in (0, 2, 4)
        for rank in (0, 1)
    ]
    models = Models()
    assert not fed(models, *parts[:5])
    (view,) = fed(models, parts[5])
    assert [each.name for each in view.by_rank[0]] == list("abcde")


def test_a_plan_that_broke_off_is_begun_anew():
    plans = copies(names="abc")
    broken = plan_event(0, plans[:2], first=0, total=3)
    (view,) = fed(Models(), plan_event(1, plans), broken, plan_event(0, plans))
    assert view.by_rank[0] == tuple(plans)


def test_a_plan_whose_middle_is_lost_is_not_complete():
    plans = copies(names="abc")
    ends = [plan_event(0, [plans[n]], first=n, total=3) for n in (0, 2)]
    assert not fed(Models(), plan_event(1, plans), *ends)


def test_a_plan_that_changes_later_is_not_shown_again():
    models, thawed = reported(), copies(requires_grad=False)
    later = {"moment": Moment.GRADIENT, "step": 7}
    assert not fed(models, *[plan_event(rank, thawed, **later) for rank in (0, 1)])


def test_a_model_that_begins_again_is_shown_when_all_ranks_have_begun_it_again():
    models, anew = reported(), copies(wrapper="FSDP2")
    assert not fed(models, plan_event(1, anew, step=5))
    (view,) = fed(models, plan_event(0, anew, step=5))
    assert view.step == 5
    assert view.by_rank == {0: tuple(anew), 1: tuple(anew)}


def test_a_rank_ahead_of_the_others_is_put_beside_what_they_tell_later():
    models, first, second = Models(), copies(), copies(dtype="bfloat16")
    views = fed(models, *[plan_event(0, first), plan_event(0, second)])
    views += fed(models, *[plan_event(1, first), plan_event(1, second)])
    assert [view.by_rank[0] == view.by_rank[1] for view in views] == [True, True]


def test_a_model_that_nothing_keeps_together_has_no_view():
    plans = copies(evidence=ReplicaEvidence.WORLD, wrapper="")
    assert not fed(Models(), plan_event(0, plans), plan_event(1, plans))


def test_the_mesh_tells_who_keeps_a_model_together():
    plans = [
        [plan("a", mesh=mesh(4), replicas=(r,), evidence=ReplicaEvidence.MESH)] for r in range(4)
    ]
    models = Models()
    views = fed(models, *[plan_event(rank, each) for rank, each in enumerate(plans)])
    assert [view.ranks for view in views] == [RankSet(range(4))]


STAGES = {0: copies((0, 1), "ab"), 1: copies((0, 1), "ab")}
STAGES |= {2: copies((2, 3), "cd"), 3: copies((2, 3), "cd")}


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)],
    ids=str,
)
def test_stages_of_a_pipeline_are_shown_apart(order):
    models = Models()
    views = fed(models, *[plan_event(rank, STAGES[rank]) for rank in order])
    shown = {view.ranks: view.by_rank[min(view.ranks)][0].name for view in views}
    assert shown == {RankSet([0, 1]): "a", RankSet([2, 3]): "c"}


# Contents


def test_what_differs_is_shown_with_what_each_rank_holds():
    (view,) = fed(reported(), *states([(0.1, 0.2), (0.1, 0.3)]))
    assert isinstance(view, ReplicaView)
    (tensor,) = view.tensors
    assert tensor.plan.name == "b"
    assert tensor.by_rank == {0: content(0.2), 1: content(0.3)}
    assert (view.moment, view.step, view.num_compared) == (Moment.START, 0, 2)
    assert (view.evidence, view.ranks) == (ReplicaEvidence.WRAPPER, RankSet([0, 1]))
    assert view.sites[1].location.line == 21


def test_equal_contents_make_no_view():
    assert not fed(reported(), *states([(0.1, 0.2)] * 2))


def test_states_in_parts_are_put_together():
    parts = [
        state_event(rank, held, first=first, total=2)
        for first, held in ((0, [0.1]), (1, [0.2]))
        for rank in (0, 1)
    ]
    parts[3] = state_event(1, [0.3], first=1, total=2)
    models = reported()
    assert not fed(models, *parts[:3])
    (view,) = fed(models, parts[3])
    assert [tensor.plan.name for tensor in view.tensors] == ["b"]


def test_a_state_before_its_plan_is_left_out():
    models = Models()
    assert not fed(models, *states([(0.1,), (0.2,)]))


def test_the_groups_of_a_mesh_of_two_axes_are_compared_apart():
    models, places = Models(), {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    values = {"mesh": mesh(2, 2), "evidence": ReplicaEvidence.MESH, "wrapper": "FSDP2"}
    for rank, alike in places.items():
        fed(models, plan_event(rank, copies(alike, names=("a",), **values)))
    views = fed(models, *states([(0.1,), (0.2,), (0.1,), (0.3,)]))
    assert [view.ranks for view in views] == [RankSet([1, 3])]
    assert views[0].tensors[0].by_rank == {1: content(0.2), 3: content(0.3)}


def test_stages_of_a_pipeline_with_the_same_names_are_not_compared():
    models = Models()
    for rank, stage in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)]):
        fed(models, plan_event(rank, copies(stage, names=("a",))))
    assert not fed(models, *states([(0.1,), (0.1,), (0.2,), (0.2,)]))
    (view,) = fed(models, *states([(0.1,), (0.1,), (0.2,), (0.9,)], **LATE))
    assert view.ranks == RankSet([2, 3])


def test_shards_are_not_compared():
    models = Models()
    for rank in (0, 1):
        fed(models, plan_event(rank, copies((rank,), mesh=mesh(2), evidence=ReplicaEvidence.MESH)))
    assert not fed(models, *states([(0.1, 0.2), (0.3, 0.4)]))


def test_digests_of_a_cpu_and_of_a_gpu_are_not_compared():
    on_gpu = content(0.1, digest="g1")
    assert not fed(reported(names=("a",)), *states([(content(0.1, digest="c2"),), (on_gpu,)]))


def test_a_moment_that_one_rank_never_tells_makes_no_view():
    models = reported((0, 1, 2))
    held = [(0.1, 0.2), (0.1, 0.3), (0.1, 0.2)]
    assert not fed(models, *states(held[:2]))
    assert not fed(models, state_event(2, held[2], **LATE))


def test_moments_that_wait_in_vain_are_given_up():
    models = reported()
    waiting = [state_event(0, (0.1, 0.2), step=step) for step in range(MOST_OPEN + 1)]
    assert not fed(models, *waiting)
    assert not fed(models, state_event(1, (0.1, 0.3), step=0))
    (view,) = fed(models, state_event(1, (0.1, 0.3), step=MOST_OPEN))
    assert view.step == MOST_OPEN


def test_two_looks_in_one_step_are_kept_apart():
    held = [(0.1, 0.2), (0.1, 0.5)]
    events = [state_event(rank, each, **LATE) for rank in (0, 1) for each in held]
    assert not fed(reported(), *events)


def test_a_tensor_that_only_some_ranks_have_is_not_compared():
    models, ranks = Models(), (0, 1, 2)
    for rank in ranks:
        fed(models, plan_event(rank, copies(ranks, names="b" if rank == 2 else "ab")))
    assert not fed(models, *states([(0.1, 0.5), (0.2, 0.5), (0.5,)]))


def test_what_cannot_be_read_on_one_rank_is_not_compared():
    assert not fed(reported(names="a"), *states([(0.1,), (None,)]))


def test_tied_weights_are_compared_under_their_first_name():
    models = Models()
    plans = [*copies(names="a"), *copies(names="b", tied_to="a")]
    fed(models, *[plan_event(rank, plans) for rank in (0, 1)])
    (view,) = fed(models, *states([(0.1, 0.1), (0.2, 0.2)]))
    assert [tensor.plan.name for tensor in view.tensors] == ["a"]
    assert view.num_compared == 1


def test_views_are_shown_once_for_each_moment():
    models, held = reported(), [(0.1, 0.2), (0.1, 0.3)]
    assert len(fed(models, *states(held))) == 1
    assert not fed(models, *states(held, step=1))
    assert len(fed(models, *states(held, **LATE))) == 1


def test_running_statistics_of_the_first_step_do_not_hide_a_parameter_of_a_later_one():
    models = Models()
    plans = [*copies(names="w"), *copies(names=("mean",), is_parameter=False)]
    fed(models, *[plan_event(rank, plans) for rank in (0, 1)])
    fed(models, *states([(0.1, 0.0)] * 2))
    fed(models, *states([(0.1, 0.2), (0.1, 0.3)], moment=Moment.STEP, step=0))
    views = fed(models, *states([(0.1, 0.2), (0.5, 0.3)], **LATE))
    assert ["w" in [t.plan.name for t in view.tensors] for view in views] == [True]


def test_a_bias_by_which_experts_are_chosen_is_compared_at_each_step():
    models = Models()
    kept = {"is_parameter": False, "is_routing_bias": True}
    plans = [*copies(names="w"), *copies(names=("bias",), **kept)]
    fed(models, *[plan_event(rank, plans) for rank in (0, 1)])
    fed(models, *states([(0.1, 0.0)] * 2))
    (view,) = fed(models, *states([(0.1, 0.2), (0.1, 0.3)], **LATE))
    assert [tensor.plan.name for tensor in view.tensors] == ["bias"]
    assert view.alike_at == 0


def test_a_parameter_that_was_alike_is_reported_from_a_buffer_that_never_was():
    models = Models()
    plans = [*copies(names="w"), *copies(names=("seed",), is_parameter=False)]
    fed(models, *[plan_event(rank, plans) for rank in (0, 1)])
    fed(models, *states([(0.1, 0.2), (0.1, 0.3)]))
    (view,) = fed(models, *states([(0.1, 0.2), (0.5, 0.3)], **LATE))
    assert view.alike_at == 0


@pytest.mark.parametrize("held", [[(0.1, 0.2)] * 2, [(0.1, 0.2), (0.1, 0.3)]], ids=str)
def test_all_contents_are_shown_once_when_the_model_is_used_first(held):
    views = [v for v in all_fed(reported(), *states(held)) if isinstance(v, ContentView)]
    (view,) = views
    assert (view.model, view.step, set(view.by_rank)) == ("Net", 0, {0, 1})
    assert [(p.name, c) for p, c in view.by_rank[1]] == [
        (name, content(value)) for name, value in zip("ab", held[1], strict=True)
    ]


def test_what_cannot_be_read_is_no_content():
    (view,) = all_fed(reported(), *states([(0.1, None)] * 2))
    assert [p.name for p, _ in view.by_rank[0]] == ["a"]


def test_later_contents_are_not_shown_as_a_whole():
    assert not all_fed(reported(), *states([(0.1, 0.2)] * 2, **LATE))


def test_shared_copies_are_compared_under_any_name():
    models = Models()
    marks = {"replicas": (0, 1), "evidence": ReplicaEvidence.MARKED, "is_shared": True}
    fed(models, plan_event(0, [plan("embed.weight", **marks)]))
    fed(models, plan_event(1, [plan("head.weight", **marks)]))
    assert not fed(models, *states([(0.1,), (0.1,)]))

    (view,) = fed(models, *states([(0.1,), (0.3,)], **LATE))

    assert view.ranks == RankSet([0, 1])
    assert view.alike_at == 0


@pytest.mark.parametrize(
    ("last", "evidence"), [("c", ReplicaEvidence.WORLD), ("b", ReplicaEvidence.MARKED)]
)
def test_marks_tell_nothing_of_stages_which_have_layers_of_the_same_names(last, evidence):
    models = Models()
    marks = {"replicas": (0, 1), "evidence": ReplicaEvidence.MARKED}
    fed(models, plan_event(0, [plan("a", **marks), plan("b", **marks)]))
    fed(models, plan_event(1, [plan("a", **marks), plan(last, **marks)]))
    assert not fed(models, *states([(0.1, 0.5)] * 2))

    (view,) = fed(models, *states([(0.1, 0.5), (0.3, 0.5)], **LATE))

    assert (view.evidence, view.alike_at) == (evidence, 0)
    assert [each.plan.name for each in view.tensors] == ["a"]


def reduction(ranks):
    """A call of one rank that reduces what is as large as a gradient."""
    job = Job(8)
    return job.call(ranks[0], group=job.group(ranks, str(ranks)), sign=signature(numel=256))


def stages(*reducing, starts=(0.1,) * 4):
    """Two stages of two ranks each, with a layer of one name; the second one drifts apart."""
    parallel = ParallelGroups()
    models = Models(parallel)
    marks = {"replicas": (0, 1, 2, 3), "evidence": ReplicaEvidence.MARKED}
    for rank in range(4):
        names = ("norm", "embed") if rank < 2 else ("norm", "head")
        fed(models, plan_event(rank, [plan(name, **marks) for name in names]))
    fed(models, *states([(start, 0.5) for start in starts]))
    for group in reducing:
        parallel.feed_call(reduction(group))
    found = fed(models, *states([(0.3, 0.6), (0.3, 0.6), (0.4, 0.6), (0.5, 0.6)], **LATE))
    return [view for view in found if view.evidence is ReplicaEvidence.MARKED]


def test_stages_whose_ranks_reduce_among_themselves_are_compared_each_by_itself():
    (view,) = stages((0, 1), (2, 3))
    assert (view.ranks, view.alike_at) == (RankSet([2, 3]), 0)
    assert [each.plan.name for each in view.tensors] == ["norm"]


@pytest.mark.parametrize("reducing", [(), ((0, 1, 2, 3),), ((1, 2),)], ids=str)
def test_ranks_that_do_not_may_be_several_stages(reducing):
    assert not stages(*reducing)


def test_groups_that_overlap_join_the_ranks_of_a_stage():
    parallel = ParallelGroups()
    for group in ((0, 1), (2, 3), (0, 2), (3, 4)):
        parallel.feed_call(reduction(group))
    assert parallel.are_joined((0, 1, 2, 3))
    assert not parallel.are_joined((0, 1, 4))


# Differences that are rounding, and until when copies were the same


@pytest.mark.parametrize(
    ("moment", "change", "is_shown"),
    [
        (Moment.START, 1e-7, True),
        (Moment.STEP, 1e-6, False),
        (Moment.STEP, 1e-4, True),
        (Moment.GRADIENT, 1e-4, False),
        (Moment.GRADIENT, 1e-2, True),
    ],
)
def test_differences_of_the_size_of_rounding_are_silent_once_ranks_have_computed(
    moment, change, is_shown
):
    views = fed(reported(names="a"), *states([(0.5,), (0.5 + change,)], moment=moment))
    assert bool(views) is is_shown


def test_nothing_but_nan_on_the_first_rank_is_no_rounding():
    held = [(ALL_NAN,), (content(0.5),)]
    assert fed(reported(names="a"), *states(held, moment=Moment.GRADIENT))


@pytest.mark.parametrize("spoilt", [ALL_NAN, content(0.5, nan_share=0.25)], ids=["all", "some"])
def test_nan_on_a_later_rank_is_no_rounding(spoilt):
    held = [(content(0.5),), (spoilt,)]
    assert fed(reported(names="a"), *states(held, moment=Moment.GRADIENT))


def test_zeros_against_values_are_no_rounding():
    assert Disagreement(plan(), {0: ZEROS, 1: content(0.5)}).difference >= 1.0


def test_the_last_step_at_which_all_were_alike_is_reported():
    models, alike = reported(names="a"), [(0.1,), (0.1,)]
    for step in (0, 1, 2):
        assert not fed(models, *states(alike, moment=Moment.STEP, step=step))
    (view,) = fed(models, *states([(0.1,), (0.4,)], moment=Moment.STEP, step=100))
    assert view.alike_at == 2


def test_before_the_first_step_the_start_counts():
    models = reported(names="a")
    assert not fed(models, *states([(0.1,), (0.1,)]))
    (view,) = fed(models, *states([(0.1,), (0.4,)], moment=Moment.STEP))
    assert view.alike_at == 0


def test_what_was_never_alike_has_no_such_step():
    (view,) = fed(reported(names="a"), *states([(0.1,), (0.4,)], moment=Moment.STEP))
    assert view.alike_at is None
