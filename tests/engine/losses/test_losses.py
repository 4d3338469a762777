"""The backward passes of the same step on all ranks."""

from __future__ import annotations

import pytest

from distdiag.engine.losses.losses import MOST_WINDOWS, LossWindows
from distdiag.events.ranks import RankSet
from distdiag.views.models import ScalingView
from tests.checks.losses import mean, reported
from tests.checks.streams import Job, plain_site, signature


def fed(*events, world=2):
    windows = LossWindows(RankSet(range(world)))
    return [view for view in map(windows.add, events) if view is not None]


def test_a_step_is_shown_when_all_ranks_have_reported_it_with_those_before():
    first, second = fed(
        reported(0, [mean(3)]),
        reported(0, [mean(4)], 1),
        reported(1, [mean(5)]),
        reported(1, [mean(6)], 1),
    )
    assert [window.step for window in first.windows] == [0]
    assert [window.step for window in second.windows] == [0, 1]
    assert [each.num_counted for _, each in second.windows[1].passes()] == [4, 6]
    assert second.has_wrapper


def test_optimizers_and_groups_are_kept_apart():
    views = fed(
        reported(0, [mean(3)]),
        reported(1, [mean(3)], optimizer="SGD"),
        reported(1, [mean(3)], members=(1, 2)),
        reported(2, [mean(3)], members=(1, 2)),
        world=3,
    )
    assert [view.ranks for view in views] == [RankSet([1, 2])]


def test_without_members_a_step_waits_for_the_world():
    (view,) = fed(reported(0, [mean(3)], members=()), reported(1, [mean(3)], members=()))
    assert not view.has_wrapper


def test_only_the_newest_steps_are_kept():
    views = fed(*[reported(r, [mean(3)], n) for n in range(MOST_WINDOWS + 4) for r in (0, 1)])
    assert [window.step for window in views[-1].windows] == [*range(4, MOST_WINDOWS + 4)]


def test_passes_of_unlike_number_or_kind_are_not_known():
    (view,) = fed(reported(0, [mean(3), mean(4)]), reported(1, [mean(3)]))
    assert view.windows[0].num_passes == 0
    (view,) = fed(reported(0, [mean(3)]), reported(1, [None]))
    assert view.windows[0].num_passes == 0


def test_gradients_that_were_multiplied_are_noted_and_clipped_ones_are_not():
    for factor, expected in ((2.0, True), (0.5, False)):
        windows = LossWindows(RankSet([0]))
        windows.note(ScalingView("Net", 0, {0: factor}))
        view = windows.add(reported(0, [mean(3)], members=(0,)))
        assert view is not None
        assert view.is_multiplied is expected


def summed_by_hand(factor, num_elements=100, ranks=(0, 1), reduce_op="SUM", op="all_reduce"):
    """The program all-reduces so many numbers before each step, and gradients become larger."""
    windows, job = LossWindows(RankSet([0, 1])), Job()
    for step in range(3):
        for rank in (0, 1):
            asked = signature(op, num_elements, reduce_op=reduce_op)
            group = job.group(ranks)
            windows.hear(job.call(rank, plain_site(10), sign=asked, group=group, step=step))
        windows.note(ScalingView("Net", step, {0: factor, 1: factor}, {}, 100))
    (view,) = [v for v in (windows.add(reported(rank, [mean(3)])) for rank in (0, 1)) if v]
    return view


def test_averaged_gradients_that_are_added_up_once_more_are_noted():
    view = summed_by_hand(2.0)
    assert view.resummed == (0, 1, 2)
    assert view.sum_site.location.line == 10


@pytest.mark.parametrize(
    "values",
    [
        {"factor": 1.0},
        {"factor": 1.2},
        {"factor": 2.0, "num_elements": 1},
        {"factor": 2.0, "ranks": (0, 1, 2)},
        {"factor": 2.0, "reduce_op": "AVG"},
        {"factor": 2.0, "reduce_op": None},
        {"factor": 2.0, "op": "all_gather"},
    ],
    ids=str,
)
def test_sums_that_are_divided_again_or_of_something_else_are_not(values):
    assert not summed_by_hand(**values).resummed
