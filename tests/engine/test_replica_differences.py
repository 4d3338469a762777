"""Which differences between copies are rounding, and until when copies were the same."""

from __future__ import annotations

import pytest

from distdiag.events.models import Moment
from distdiag.views.models import Disagreement
from tests.checks.models import ALL_NAN, ZEROS, content, plan
from tests.engine.models import fed, states, told


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
    views = fed(told(names="a"), *states([(0.5,), (0.5 + change,)], moment=moment))
    assert bool(views) is is_shown


def test_nothing_but_nan_on_the_first_rank_is_no_rounding():
    held = [(ALL_NAN,), (content(0.5),)]
    assert fed(told(names="a"), *states(held, moment=Moment.GRADIENT))


@pytest.mark.parametrize("spoilt", [ALL_NAN, content(0.5, nan_share=0.25)], ids=["all", "some"])
def test_nan_on_a_later_rank_is_no_rounding(spoilt):
    held = [(content(0.5),), (spoilt,)]
    assert fed(told(names="a"), *states(held, moment=Moment.GRADIENT))


def test_zeros_against_values_are_no_rounding():
    assert Disagreement(plan(), {0: ZEROS, 1: content(0.5)}).difference >= 1.0


def test_the_last_step_at_which_all_were_alike_is_told():
    models, alike = told(names="a"), [(0.1,), (0.1,)]
    for step in (0, 1, 2):
        assert not fed(models, *states(alike, moment=Moment.STEP, step=step))
    (view,) = fed(models, *states([(0.1,), (0.4,)], moment=Moment.STEP, step=100))
    assert view.alike_at == 2


def test_before_the_first_step_the_start_counts():
    models = told(names="a")
    assert not fed(models, *states([(0.1,), (0.1,)]))
    (view,) = fed(models, *states([(0.1,), (0.4,)], moment=Moment.STEP))
    assert view.alike_at == 0


def test_what_was_never_alike_has_no_such_step():
    (view,) = fed(told(names="a"), *states([(0.1,), (0.4,)], moment=Moment.STEP))
    assert view.alike_at is None
