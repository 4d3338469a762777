"""Steps of optimizers and scalers, side by side."""

import pytest

from distdiag.engine.updates import ScalerAligner, UpdateAligner
from distdiag.events.models import ModelPlan, Moment, ReplicaEvidence, TensorPlan
from distdiag.events.updates import CastsReused, TensorUpdate
from distdiag.views.updates import CastsView, NormView, ScalerView, SkippingView, UpdateView
from tests.checks.models import plan
from tests.checks.streams import event_of, plain_site
from tests.checks.updates import call, look, tensor
from tests.engine.aligned import aligned


def model_of(rank: int, *tensors: TensorPlan) -> ModelPlan:
    return event_of(
        ModelPlan,
        rank,
        model="DDP Net",
        moment=Moment.START,
        first=0,
        total=len(tensors),
        tensors=tensors,
        site=plain_site(1),
    )


def test_a_step_is_shown_when_all_ranks_have_taken_it() -> None:
    shown = aligned(UpdateAligner, look(0), look(1), look(0, rank=1), ends=False)
    (view,) = shown.views
    assert isinstance(view, UpdateView)
    assert {rank: len(looks) for rank, looks in view.by_rank.items()} == {0: 1, 1: 1}


def test_an_optimizer_of_one_rank_is_shown_at_the_end() -> None:
    shown = aligned(UpdateAligner, look(0, rank=1), look(1, rank=1))
    (view,) = shown.views
    assert isinstance(view, UpdateView)
    assert [each.number for each in view.by_rank[1]] == [0, 1]
    assert "no cast rounded" in shown.why(next(k for k in shown.gaps if "Positions" in k.__name__))


def test_what_all_ranks_have_seen_is_one_view() -> None:
    site = plain_site(3)
    events = [
        event_of(CastsReused, r, optimizer="SGD", dtype="bfloat16", site=site, step_site=site)
        for r in (0, 1, 1)
    ]
    (view,) = aligned(UpdateAligner, *events).views
    assert isinstance(view, CastsView)
    assert sorted(view.by_rank) == [0, 1]


def test_ranks_that_train_together_are_compared_call_by_call() -> None:
    together = plan(replicas=(0, 1))
    events = [model_of(0, together), model_of(1, together)]
    same = aligned(ScalerAligner, *events, call(0), call(1))
    assert not [view for view in same.views if isinstance(view, ScalerView)]

    shown = aligned(ScalerAligner, *events, call(0), call(1, is_skipped=True))
    (view,) = [view for view in shown.views if isinstance(view, ScalerView)]
    assert view.are_together


def test_ranks_of_models_of_their_own_are_not_known_to_be_together() -> None:
    shown = aligned(ScalerAligner, call(0), call(1, is_skipped=True))
    kinds = [type(view) for view in shown.views]
    assert kinds == [SkippingView, ScalerView]
    assert not shown.views[1].are_together  # type: ignore[attr-defined]


def test_a_run_without_scalers_says_so() -> None:
    assert aligned(ScalerAligner).why(ScalerView) == "no gradient scaler was used"


def held(name: str, *replicas: int) -> TensorPlan:
    return plan(name, replicas=replicas, evidence=ReplicaEvidence.MESH, requires_grad=True)


def norm_of(name: str, norm: float) -> TensorUpdate:
    return tensor(name, gradient_norm=norm)


def test_norms_over_ranks_count_parts_and_copies_once() -> None:
    plans = [model_of(r, held("part", r), held("copy", 0, 1)) for r in (0, 1)]
    steps = [
        look(0, norm_of("part", part), norm_of("copy", 2.0), rank=rank, model="DDP Net")
        for rank, part in ((0, 3.0), (1, 4.0))
    ]
    views = aligned(UpdateAligner, *plans, *steps).views
    (view,) = [each for each in views if isinstance(each, NormView)]
    (found,) = view.steps
    squares = [each**2 for each in found[1:5]]
    assert squares == pytest.approx([29.0, 33.0, 25.0, 4.0])
    assert [each**2 for each in found.own] == pytest.approx([13.0, 20.0])


def test_norms_are_not_known_where_nothing_tells_who_holds_what() -> None:
    guessed = plan("part", replicas=(0, 1), evidence=ReplicaEvidence.WORLD, requires_grad=True)
    plans = [model_of(r, guessed) for r in (0, 1)]
    steps = [look(0, norm_of("part", 1.0), rank=rank, model="DDP Net") for rank in (0, 1)]
    views = aligned(UpdateAligner, *plans, *steps).views
    assert not [each for each in views if isinstance(each, NormView)]
