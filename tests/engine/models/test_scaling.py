"""By what each rank multiplied its gradients between the backward pass and the step."""

from __future__ import annotations

import msgspec
import pytest

from distdiag.engine.models.models import FEWEST, Models, scaling
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.views.models import ScalingView
from tests.checks.models import ALL_NAN, ZEROS, content, mesh, plan_event, state_event
from tests.engine.models.copies import copies, fed


def scaled(models, before, *after):
    """All ranks had these gradients after the backward pass, and others at the step."""
    events = []
    for rank, late in enumerate(after):
        events.append(state_event(rank, before, moment=Moment.BACKWARD, step=4))
        events.append(state_event(rank, late, moment=Moment.GRADIENT, step=4))
    return [view for view in fed(models, *events) if isinstance(view, ScalingView)]


def gradient(peak, **values):
    return content(0.0, least=-peak / 2, greatest=peak, **values)


def few(peak):
    return gradient(peak, num_elements=FEWEST - 1)


def sharded():
    models = Models()
    for rank in (0, 1):
        plans = copies((rank,), names="abc", mesh=mesh(2), evidence=ReplicaEvidence.MESH)
        fed(models, plan_event(rank, plans))
    return models


PEAKS = [gradient(4.0), gradient(2.0), None]
CLIPPED = [gradient(2.0), gradient(1.0), None]


def test_each_rank_has_its_own_factor():
    (view,) = scaled(sharded(), PEAKS, CLIPPED, PEAKS)
    assert (view.model, view.step) == ("Net", 4)
    assert view.by_rank == pytest.approx({0: 0.5, 1: 1.0})


def test_gradients_of_another_step_are_not_put_beside():
    events = [
        state_event(rank, PEAKS, moment=moment, step=step)
        for rank in (0, 1)
        for moment, step in ((Moment.BACKWARD, 3), (Moment.GRADIENT, 4))
    ]
    assert not fed(sharded(), *events)


def test_the_last_backward_pass_of_a_step_counts():
    models = sharded()
    fed(models, *[state_event(r, CLIPPED, moment=Moment.BACKWARD, step=4) for r in (0, 1)])
    (view,) = scaled(models, PEAKS, PEAKS, PEAKS)
    assert view.by_rank == pytest.approx({0: 1.0, 1: 1.0})


def test_without_a_factor_on_one_rank_there_is_no_view():
    several = [gradient(4.0), gradient(1.0), None]
    assert not scaled(sharded(), PEAKS, several, CLIPPED)


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        (PEAKS, CLIPPED, 0.5),
        (PEAKS, PEAKS, 1.0),
        (PEAKS, [gradient(-2.0), gradient(-1.0), None], None),
        (PEAKS, [ZEROS, ZEROS, None], None),
        ([gradient(4.0)], [content(0.0, least=-4.0, greatest=2.0)], None),
        ([gradient(4.0), gradient(2.0)], [gradient(2.0), gradient(1.01)], 0.5),
        ([gradient(4.0), gradient(2.0)], [gradient(2.0), gradient(1.5)], None),
        ([gradient(4.0), ZEROS], [gradient(2.0), ZEROS], 0.5),
        ([ZEROS], [ZEROS], None),
        ([ZEROS], [gradient(1.0)], None),
        ([gradient(4.0), gradient(2.0)], [gradient(2.0), ALL_NAN], None),
        ([gradient(4.0), ALL_NAN], [gradient(2.0), ALL_NAN], 0.5),
        ([gradient(4.0), None], [gradient(2.0), gradient(7.0)], 0.5),
        ([few(4.0), few(2.0)], [few(2.0), few(1.0)], None),
        ([few(4.0), gradient(2.0)], [few(2.0), gradient(1.0)], 0.5),
        ([None], [None], None),
        ([], [], None),
    ],
    ids=[
        "clipped",
        "left-as-they-are",
        "turned-round",
        "thrown-away",
        "another-range",
        "nearly-one",
        "several",
        "a-zero-beside",
        "zeros-only",
        "from-zero",
        "became-nan",
        "was-nan",
        "came-later",
        "of-a-few-numbers",
        "of-a-few-and-of-many",
        "none",
        "nothing",
    ],
)
def test_the_factor_of_a_rank(before, after, factor):
    found = scaling(before, after)
    assert (found is None) if factor is None else (found == pytest.approx(factor, rel=0.01))


@pytest.mark.parametrize(("wrapper", "num_views"), [("DDP", 1), ("", 0)])
def test_gradients_of_a_wrapper_that_the_program_reduces_as_well(wrapper, num_views):
    models = Models()
    for rank in (0, 1):
        plans = copies((0, 1), "abc", wrapper=wrapper, evidence=ReplicaEvidence.REDUCED)
        plans = [msgspec.structs.replace(each, requires_grad=True) for each in plans]
        fed(models, plan_event(rank, plans))
    views = scaled(models, CLIPPED, PEAKS, PEAKS)
    assert [view.by_rank for view in views] == [pytest.approx({0: 2.0, 1: 2.0})] * num_views
    assert all(view.num_elements > 0 for view in views)
