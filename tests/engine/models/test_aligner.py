"""From the events of models to the findings of the checks that judge them."""

from __future__ import annotations

import pytest

from distdiag.checks import load_checks
from distdiag.engine.coverage import KINDS
from distdiag.engine.engine import Engine
from distdiag.engine.models.aligner import ModelWatch
from distdiag.engine.runner import Judges
from distdiag.events.base import Event
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import Basis, Moment, OptimizerState, SliceSaved
from distdiag.events.ranks import RankSet
from tests.checks.models import (
    ZEROS,
    content,
    mesh,
    optimizer_state,
    plan,
    plan_event,
    state_event,
)
from tests.checks.rep.test_rng_mismatch import draw
from tests.checks.streams import plain_site
from tests.engine.models import copies

PAIR = (0, 1)


def watched(*events: Event, is_over: bool = True) -> dict[str, list[int]]:
    """The culprits by the code of each finding."""
    judges = Judges(check() for check in load_checks().values())
    watch = ModelWatch(RankSet(PAIR), judges)
    for event in events:
        watch.feed(event)
    if is_over:
        watch.finish()
    assert not judges.disabled
    return {finding.code: list(finding.ranks) for finding in judges.conclusions.all()}


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
    plans = [plan("w", keeper="", placements=("R",), replicas=PAIR, mesh=mesh(2), basis=Basis.MESH)]
    gradients = of_both(state_event, (0.1,), (0.4,), moment=Moment.GRADIENT)
    assert watched(*of_both(plan_event, plans, plans), *gradients) == {"SHD004": [0, 1]}


def test_gradients_that_are_scaled_differently():
    plans = [
        [plan("w", placements=("S(0)",), replicas=(rank,), mesh=mesh(2), basis=Basis.MESH)]
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
    assert not watched(empty, is_over=False)
    assert watched(empty) == {"SHD005": [0]}


def test_a_save_that_only_one_rank_makes_is_judged_at_the_end():
    save = SliceSaved(rank=0, seq=0, time_ns=0, names=("w",), members=PAIR, site=plain_site(60))
    assert not watched(save, is_over=False)
    assert watched(save) == {"CKP002": [1]}


def test_checks_of_models_did_not_look_where_their_probe_was_off():
    catalogue = load_checks()
    engine = Engine([catalogue[code]() for code in ("REP001", "SHD002", "COL001")], RankSet(PAIR))

    off = ProbeDisabled(rank=1, seq=0, time_ns=0, probe="models", reason="OSError: no room")
    engine.feed(off)

    reason = "the models of rank 1 are not observed wholly"
    assert engine.not_checked == {"REP001": reason, "SHD002": reason}


MODEL_CODES = {
    code
    for code, check in load_checks().items()
    if any(kind in check.needs for kind in KINDS) and not check.absent
} - {"REP005", "SEQ012"}


def gaps(*events: Event, **options: bool) -> dict[str, str]:
    """What a run in which this was seen says of the checks of models that compared nothing."""
    engine = Engine([check() for check in load_checks().values()], RankSet(PAIR), **options)
    for event in events:
        engine.feed(event)
    engine.finish()
    return {code: why for code, why in engine.not_checked.items() if code in MODEL_CODES}


def test_where_no_model_was_seen_no_check_of_models_claims_to_have_looked():
    found = gaps()
    assert found.keys() == MODEL_CODES
    assert set(found.values()) == {"no model was seen"}


def test_the_light_profile_leaves_the_checks_of_steps_out_and_no_others():
    reason = "the light profile leaves the steps out"
    found = gaps(*PLANS, *ALIKE, only_start=True)
    assert {"REP003", "REP004", "SHD001", "SHD004", "SHD005", "SHD006"} <= found.keys()
    assert set(found.values()) == {reason}
    assert not {"REP001", "REP002", "SHD002", "SHD003", "SHD011", "CKP002"} & found.keys()


def test_what_was_compared_counts_as_checked():
    gradients = of_both(state_event, (0.3, 0.2), (0.3, 0.2), moment=Moment.GRADIENT)
    step = of_both(state_event, (0.3, 0.2), (0.3, 0.2), moment=Moment.STEP)
    told = [*PLANS, *ALIKE, *gradients, *step]
    steps = {code for code, check in load_checks().items() if OptimizerState in check.needs}
    reason = "no step of a model was compared"
    scaling = {"SHD006": "by what a model's gradients were scaled was not seen"}
    assert gaps(*told) == dict.fromkeys(steps, reason) | scaling
    assert gaps(*told, *[optimizer_state(rank, members=PAIR) for rank in PAIR]) == scaling


def test_one_rank_alone_has_nothing_to_compare():
    found = gaps(plan_event(0, copies((0,))), state_event(0, (0.1, 0.2)))
    assert found["SHD002"] == "nothing tells which ranks keep a model together"
    assert found["REP001"] == "no two ranks hold a tensor that should be the same"


def test_a_model_that_is_wholly_sharded_has_no_copies_to_compare():
    sharded = [
        [plan("w", placements=("S(0)",), replicas=(rank,), mesh=mesh(2), basis=Basis.MESH)]
        for rank in PAIR
    ]
    states = [
        event
        for moment in (Moment.START, Moment.GRADIENT, Moment.STEP)
        for event in of_both(state_event, (0.1,), (0.2,), moment=moment)
    ]
    found = gaps(*of_both(plan_event, *sharded), *states)
    assert "SHD002" not in found
    reason = "no two ranks hold a tensor that should be the same"
    assert [found[code] for code in ("REP001", "REP003", "SHD004")] == [reason] * 3


def test_random_states_are_checked_only_where_ranks_should_draw_the_same():
    engine = Engine([load_checks()["REP005"]()], RankSet(PAIR))
    assert engine.not_checked == {"REP005": "no model was seen"}
    engine.feed(draw(0, "a"))
    assert engine.not_checked == {"REP005": "no two ranks draw where they should draw the same"}
    engine.feed(draw(1, "a"))
    assert not engine.not_checked
    assert not engine.findings
