from __future__ import annotations

import msgspec
import pytest

from distdiag.checks.moe.unreproducible_routing import UnreproducibleRouting
from distdiag.events.comparisons import Cause, Flip, MarginBin, Nature, Origin, RoutingDifference
from distdiag.events.ranks import RankSet
from distdiag.events.routing import Choice
from distdiag.findings.finding import Grade, Severity
from tests.checks.streams import event_of
from tests.checks.verdicts import findings

CAUSE = Cause(
    origin=Origin.MODULE,
    nature=Nature.NUMERIC,
    rank=1,
    step=4,
    micro=0,
    name="layers.0.moe",
    kind="Experts",
    ops=("index_add",),
    size=1e-7,
    dtype="float32",
)
DIFFERENCE = event_of(
    RoutingDifference,
    1,
    step=5,
    layer="layers.1.router",
    micro=2,
    call=0,
    number=0,
    is_recompute=False,
    choice=Choice("topk", 32, 8, 2, "float32"),
    flip=Flip(token=17, experts=(0, 3), experts_again=(1, 3), margin=3e-8, roundings=0.7),
    num_flipped=1,
    cause=CAUSE,
    margins=(
        MarginBin(up_to=1.0, num_tokens=5, num_flipped=2, num_flipped_first=1, is_numeric=True),
        MarginBin(
            up_to=float("inf"), num_tokens=40, num_flipped=3, num_flipped_first=0, is_numeric=False
        ),
    ),
    num_compared=9,
    num_different=3,
    culprits=RankSet([1]),
)


def found_in(**changes):
    cause = msgspec.structs.replace(CAUSE, **changes)
    event = msgspec.structs.replace(DIFFERENCE, cause=cause)
    (found,) = findings(UnreproducibleRouting, event)
    return found


def test_it_names_step_layer_token_margin_and_the_call_that_made_it():
    found = found_in()
    for words in ("step 5", "micro-step 2", "layer layers.1.router", "token 17", "0.7 roundings"):
        assert words in found.message
    assert "layers.0.moe (Experts)" in found.message and "index_add" in found.message
    assert (found.severity, found.ranks, found.step) == (Severity.WARNING, RankSet([1]), 5)
    assert any(
        "rounding may explain 1 of the flips in step 5 by their margins; flips" in e.summary
        for e in found.evidence
    )


@pytest.mark.parametrize(
    ("origin", "words"),
    [(Origin.DATA, "sampler"), (Origin.WEIGHTS, "before the model"), (Origin.DRAW, "generator")],
)
def test_what_did_not_come_from_rounding_is_fixed_by_a_seed(origin, words):
    found = found_in(origin=origin, nature=Nature.LOGIC, size=-1.0, ops=())
    assert words in found.fix
    assert "no rounding" in found.message


def test_noise_that_a_router_is_reported_to_draw_is_a_note():
    found = found_in(origin=Origin.DRAW, nature=Nature.MEANT, size=-1.0, ops=())
    assert (found.grade, found.severity) == (Grade.NOTE, Severity.INFO)
