"""Findings say where that was made which they name."""

from __future__ import annotations

from distdiag.engine.creations import Creations
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import GroupCreated
from distdiag.events.models import ObjectCreated, ObjectKind
from distdiag.events.numerics import NonFinite, NonFinitePlace
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.base import Thing
from distdiag.views.models import ContentView
from distdiag.views.numerics import NonFiniteView
from tests.checks import updates
from tests.engine.stream import Job

VIEW = ContentView("Net", 0, {})
FINDING = Finding(
    code="REP002",
    name="uninitialised-replica",
    severity=Severity.ERROR,
    grade=Grade.LIKELY,
    confidence=0.9,
    message="weight of Net: never written on rank 1",
    ranks=RankSet([1]),
    evidence=(Evidence(ranks=RankSet([1]), summary="weight: mean 0"),),
)


def created(rank: int, line: int | None, name: str = "Net") -> ObjectCreated:
    place = None if line is None else Frame("train.py", line, "main")
    kind = ObjectKind.MODEL
    return ObjectCreated(rank=rank, seq=0, time_ns=0, object_kind=kind, name=name, place=place)


def added(*events: ObjectCreated) -> list[tuple[list[int], str, int]]:
    """Return what is added to a finding about Net: ranks, summary and line."""
    creations = Creations()
    for event in events:
        creations.feed(event)
    more = creations.complete(FINDING, VIEW).evidence[1:]
    return [(sorted(e.ranks), e.summary, e.location.line if e.location else 0) for e in more]


def test_the_line_that_made_a_model_is_evidence():
    assert added(created(0, 6), created(1, 6)) == [([0, 1], "model Net: made here", 6)]


def test_ranks_that_made_it_at_other_lines_are_told_apart():
    found = added(created(0, 6), created(1, 9))
    assert found == [([0], "model Net: made here", 6), ([1], "model Net: made here", 9)]


def test_of_two_models_of_one_name_nothing_is_said():
    assert added(created(0, 6), created(0, 9)) == []
    assert added(created(0, None), created(0, 9)) == []
    assert added(created(0, 6), created(0, 9), created(0, 6)) == []


def test_other_names_add_nothing():
    assert added(created(0, 6, "Other")) == []


def test_a_finding_about_calls_says_where_their_group_was_made():
    job = Job()
    for rank in (0, 1):
        site = CallSite((Frame("train.py", 3, "main"),))
        job.engine.feed(
            GroupCreated(
                rank=rank,
                seq=5,
                time_ns=job.now_ns,
                api="new_group",
                ordinal=0,
                scope=(0, 1),
                ranks=(0, 1),
                desc="",
                generation=0,
                site=site,
                done=True,
                name="g(0, 1)",
            )
        )
    job.call(0, size=4)
    job.call(1, size=5)
    (finding,) = job.alarms
    last = finding.evidence[-1]
    assert last.summary == "process group g(0, 1): made here"
    assert str(last.location) == "train.py:3"
    assert last.ranks == RankSet([0, 1])


def test_what_the_events_of_a_view_name_is_named():
    seen = updates.view(updates.looks(updates.tensor()), updates.looks(updates.tensor()))
    look = seen.any_look
    assert set(seen.things) == {
        Thing(ObjectKind.OPTIMIZER, look.optimizer),
        Thing(ObjectKind.MODEL, look.model),
    }


def test_the_model_in_which_numbers_stop_being_finite_is_named():
    place = NonFinitePlace("forward", "Net", "fc", "Linear", "the output", "nan", 3)
    common = {"seq": 0, "time_ns": 0, "window": 0, "outcome": "", "num_places": 1}
    events = {rank: NonFinite(rank=rank, places=(place,), **common) for rank in (0, 1)}
    view = NonFiniteView(step=0, by_rank=events, is_harmful=True)
    assert view.things == (Thing(ObjectKind.MODEL, "Net"),)
