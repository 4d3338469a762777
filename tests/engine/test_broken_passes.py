"""Exceptions that ended a pass, side by side."""

import pytest

from distdiag.checks.col.lone_exception import BrokenPassView, LoneException
from distdiag.engine.broken_passes import BrokenPassAligner
from distdiag.events.base import Frame
from distdiag.events.lifecycle import BrokenPass, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings
from tests.engine.aligned import aligned


def broken(rank: int, step: int = 5) -> BrokenPass:
    return event_of(
        BrokenPass,
        rank,
        step=step,
        what="backward pass",
        type="RuntimeError",
        message="shapes do not fit\nmore of it",
        frames=(Frame("net.py", 7, "forward"),),
        site=plain_site(30),
    )


def ended(rank: int, step: int) -> StepEnd:
    return event_of(StepEnd, rank, step=step, duration_s=0.1)


def test_what_one_rank_has_caught_is_shown_when_all_are_past_it() -> None:
    events = [broken(1), ended(1, 5), ended(0, 5), ended(1, 6)]
    assert not aligned(BrokenPassAligner, *events, ends=False).views
    (view,) = aligned(BrokenPassAligner, *events, ended(0, 6), ended(0, 7), ends=False).views
    assert isinstance(view, BrokenPassView)
    (finding,) = findings(LoneException, view)
    assert (finding.ranks, finding.grade) == (RankSet([1]), Grade.NOTE)
    assert finding.location is not None
    assert finding.location.line == 7
    assert "rank 1 caught RuntimeError that ended a backward pass in step 5" in finding.message
    assert finding.evidence[0].summary == "its backward pass raised RuntimeError: shapes do not fit"


@pytest.mark.parametrize(
    "events",
    [
        [broken(0), broken(1), ended(0, 5), ended(1, 5)],
        [ended(0, 5), ended(1, 4), broken(1)],
    ],
    ids=["on all ranks", "not caught"],
)
def test_what_all_have_or_nobody_caught_is_not(events: list[StepEnd | BrokenPass]) -> None:
    assert not aligned(BrokenPassAligner, *events).views
