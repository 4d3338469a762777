"""What ranks evaluate in parts and then write, and the metrics that they give to schedulers."""

from __future__ import annotations

import pytest

from distdiag.engine.evaluations import EvaluationAligner
from distdiag.events.data import EpochFed, MetricGiven
from distdiag.events.files import StoreCall
from distdiag.events.lifecycle import StepEnd
from distdiag.events.ranks import RankSet
from distdiag.views.data import LocalEvaluationView, MetricView
from tests.checks.feeds import epoch_fed
from tests.checks.models import optimizer_state
from tests.checks.streams import plain_site
from tests.engine.aligned import aligned
from tests.engine.traces import Trace


class Evaluation(Trace):
    """Both ranks go over their parts of a data set, and rank 0 writes a file."""

    def passes(self, begin: int, *, num_replicas: int = 2, same: bool = False) -> None:
        """Tell of the pass that began at this tick, and has come to its end now."""
        for rank in self.world:
            order = range(0 if same else rank, 32, 2)
            replica = 0 if same else rank
            fed = epoch_fed(
                rank, order, num_replicas=num_replicas, replica=replica, num_backwards=0
            )
            fields = {f: getattr(fed, f) for f in fed.__struct_fields__}
            fields |= {"begin": begin, "end": len(self.events)}
            for name in ("rank", "seq", "time_ns"):
                del fields[name]
            self.add(EpochFed, rank, **fields)

    @property
    def shown(self) -> list[LocalEvaluationView]:
        return list(aligned(EvaluationAligner, *self.events).views)


def test_a_file_that_is_written_after_an_evaluation_of_parts_is_shown():
    trace = Evaluation()
    trace.everyone("all_reduce")
    trace.passes(len(trace.events) + 1)
    trace.write(0, line=7)
    (view,) = trace.shown
    assert (RankSet(view.passes), RankSet(view.writes), view.num_writes) == (
        RankSet([0, 1]),
        RankSet([0]),
        1,
    )


def test_a_barrier_and_the_buffers_of_a_wrapper_bring_nothing_together():
    trace = Evaluation()
    begin = len(trace.events) + 1
    trace.everyone("barrier")
    trace.passes(begin)
    trace.write(0, line=7)
    assert len(trace.shown) == 1


@pytest.mark.parametrize(
    "way",
    [
        "reduced",
        "by the store",
        "by files",
        "trained since",
        "whole",
        "alone",
        "earlier",
        "another library",
    ],
)
def test_what_all_ranks_may_have_a_part_in_is_not_shown(way):
    trace = Evaluation()
    if way != "another library":
        trace.everyone("all_reduce")
    begin = len(trace.events) + 1
    if way == "earlier":
        trace.write(0, line=7)
    trace.passes(begin, num_replicas=1 if way == "alone" else 2, same=way == "whole")
    match way:
        case "reduced":
            trace.everyone("all_reduce")
        case "by the store":
            trace.add(StoreCall, 0, action="get", store="s", keys=("k",), value="v", done=True)
        case "by files":
            trace.write(1, "/d/part1")
            trace.access(0, "read", "/d/part1")
        case "trained since":
            trace.add(StepEnd, 0, duration_s=0.1, num_backwards=1)
    if way != "earlier":
        trace.write(0, line=7)
    assert not [view for view in trace.shown if 0 in view.writes]
    if way == "by files":  # the records of ranks come in any order
        trace.events.sort(key=lambda event: event.rank)
        assert not [view for view in trace.shown if 0 in view.writes]


def given(rank: int, value: float) -> MetricGiven:
    site = plain_site(20)
    return MetricGiven(
        rank=rank, seq=9, time_ns=9, name="ReduceLROnPlateau", number=0, value=value, site=site
    )


def test_metrics_of_ranks_that_train_together_are_shown():
    states = [optimizer_state(rank, members=(0, 1)) for rank in (0, 1)]
    (view,) = aligned(EvaluationAligner, *states, given(0, 0.5), given(1, 0.7)).views
    assert isinstance(view, MetricView)
    assert [each.value for each in view.by_rank.values()] == [0.5, 0.7]


def test_metrics_of_ranks_that_may_train_alone_are_not_shown():
    assert not aligned(EvaluationAligner, given(0, 0.5), given(1, 0.7)).views
