import pytest

from distdiag.checks.shd.unheld_parameter import UnheldParameter, UnheldView
from distdiag.engine.models.writes import WriteAligner
from distdiag.events.models import ReplicaEvidence
from distdiag.events.ranks import RankSet
from tests.checks.lives import MOVING, NOTHING, SAME, run
from tests.checks.models import optimizer_state, plan
from tests.engine.aligned import aligned

ADAM = "AdamW of Net"


def shared(name, *, owners=(ADAM,), **values):
    values.setdefault("replicas", (0, 1))
    return plan(name, owners=owners, **values)


def unheld(lives, owners, **values):
    """What is said of one parameter that two ranks share."""
    plans = [[shared("a.weight", owners=each, **values)] for each in owners]
    made = aligned(
        WriteAligner,
        *run([[life] for life in lives], plans),
        checks=[UnheldParameter()],
    )
    return made.findings


def test_what_one_rank_does_not_hold_and_the_other_trains_is_an_error():
    (finding,) = unheld((MOVING, SAME), ((ADAM,), ()))
    assert (finding.code, finding.severity) == ("SHD024", "error")
    assert (finding.ranks, finding.subjects) == (RankSet([1]), ("a.weight",))
    words = (
        "no optimizer holds them on rank 1, where they never change; optimizers of rank 0 hold them"
    )
    assert words in finding.message
    assert finding.location.line == 21


@pytest.mark.parametrize(
    ("lives", "owners", "values"),
    [
        ((MOVING, MOVING), ((ADAM,), ()), {}),  # the other rank sends it
        ((SAME, SAME), ((ADAM,), ()), {}),  # nobody changes it, the rate may be zero
        ((MOVING, SAME), ((), ()), {}),  # by hand
        ((MOVING, SAME), ((ADAM,), (ADAM,)), {}),
        ((MOVING, SAME), ((ADAM,), ()), {"evidence": ReplicaEvidence.WORLD}),
        ((MOVING, SAME), ((ADAM,), ()), {"evidence": ReplicaEvidence.OWN}),
        ((MOVING, SAME), ((ADAM,), ()), {"is_ignored": True}),
        ((MOVING, SAME), ((ADAM,), ()), {"requires_grad": False}),
    ],
)
def test_what_may_be_meant_is_silent(lives, owners, values):
    assert not unheld(lives, owners, **values)


PIECE = {"replicas": (), "split_over": (0, 1), "wrapper": "FSDP1"}


@pytest.mark.parametrize(("owners", "is_found"), [((ADAM,), True), ((), False)])
def test_whoever_holds_an_empty_piece_of_a_flat_parameter_means_it_to_train(owners, is_found):
    found = unheld((NOTHING, SAME), (owners, ()), **PIECE)
    assert [each.ranks for each in found] == [RankSet([1])] * is_found


def test_whoever_lacks_an_empty_piece_is_silent():
    assert not unheld((MOVING, NOTHING), ((ADAM,), ()), **PIECE)


def test_what_has_no_gradient_is_silent():
    plans = [[shared("a.weight")], [shared("a.weight", owners=())]]
    made = aligned(WriteAligner, *run([[MOVING], [SAME]], plans, gradients=False))
    assert not made.views


def test_a_parameter_that_moves_later_is_taken_back():
    plans = [[shared("a.weight")], [shared("a.weight", owners=())]]
    late = (*SAME, 0.6)
    events = run([[(*MOVING, 0.8)], [late]], plans, steps=4)
    first, second = aligned(WriteAligner, *sorted(events, key=lambda e: e.step)).views
    assert isinstance(first, UnheldView)
    assert (first.unheld, second.unheld) == ({1: ("a.weight",)}, {})
    assert first.supersedes == second.supersedes


def test_entries_that_are_one_parameter_are_reported():
    plans = [
        [shared(name) for name in ("a.weight", "b.weight")],
        [shared("a.weight", owners=()), shared("b.weight")],
    ]
    steps = [optimizer_state(rank, optimizer=ADAM, num_parameters=2) for rank in (0, 1)]
    lives = [[MOVING, MOVING], [SAME, MOVING]]
    made = aligned(WriteAligner, *steps, *run(lives, plans), checks=[UnheldParameter()])
    summaries = [each.summary for each in made.findings[0].evidence]
    assert summaries[1:] == [
        f"{ADAM} has 2 entries: a.weight and 1 more",
        f"{ADAM} has 2 entries: b.weight, some more than once",
    ]
