"""What a run has nothing of is not said to have been checked."""

from __future__ import annotations

import pytest

from distdiag.checks import load_checks
from distdiag.engine.engine import Engine
from distdiag.events.base import Event
from distdiag.events.models import Moment
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import SeenMask
from tests.checks.feeds import schedule
from tests.checks.losses import aux, over, part, told
from tests.checks.models import plan, plan_event, state_event
from tests.checks.routing import routing
from tests.checks.sequences import passed

PAIR = (0, 1)
LIGHT = "the light profile leaves the steps out"


def gaps(*events: Event, only_start: bool = False) -> dict[str, str]:
    """What a run in which this was seen says of the checks that looked at nothing."""
    checks = [check() for check in load_checks().values()]
    engine = Engine(checks, RankSet(PAIR), only_start=only_start)
    for event in events:
        engine.feed(event)
    engine.finish()
    return engine.not_checked


def of_both(tell, *values, **more):
    return [tell(rank, *values, **more) for rank in PAIR]


def model(*tensors):
    """Both ranks keep these and another one, and tell of the start and of a step."""
    plans = of_both(plan_event, (plan("gate.weight", replicas=PAIR), *tensors))
    moments = (Moment.START, Moment.GRADIENT, Moment.STEP)
    values = [0.1 * n for n in range(len(tensors) + 1)]
    states = [of_both(state_event, values, moment=each) for each in moments]
    return [*plans, *(event for each in states for event in each)]


DENSE = [*model(), *of_both(told, [part(40, 1 / 40, over(40))])]
EXPERT = model(plan("experts.0.up.weight"))
BIAS = model(plan("bias", is_routing_bias=True))
BALANCED = of_both(told, [part(40, 1 / 40, over(40), aux=(aux(),))])
REPEATED = of_both(routing, is_recompute=True)
PLACED = of_both(passed, 0, positions=("a",))
MASKED = of_both(passed, 0, mask=SeenMask(num_queries=8, num_keys=16, aligned="first"))


def test_a_dense_run_was_not_checked_for_what_experts_do():
    found = gaps(*DENSE)
    assert {code for code in load_checks() if code.startswith(("MOE", "SEQ"))} <= found.keys()
    assert found["MOE005"] == "no parameter was recognised as one of an expert"
    assert found["MOE009"] == "no balancing loss was seen in a loss"
    assert not {"PAR001", "PAR013"} & found.keys()


@pytest.mark.parametrize(
    ("code", "events"),
    [
        ("MOE001", REPEATED),
        ("MOE008", REPEATED),
        ("MOE005", EXPERT),
        ("MOE009", BALANCED),
        ("MOE013", BIAS),
        ("PAR004", of_both(schedule)),
        ("SEQ011", PLACED),
        ("SEQ013", MASKED),
    ],
)
def test_what_was_seen_counts_as_checked(code, events):
    assert code in gaps(*DENSE)
    assert code not in gaps(*DENSE, *events)


def test_what_the_light_profile_does_not_record_is_its_own_doing():
    found = gaps(*DENSE, only_start=True)
    steps = {"MOE009", "MOE010", "MOE012", "PAR001", "PAR013", "SEQ007", "SEQ011"}
    assert {found[code] for code in steps} == {LIGHT}
    assert found["MOE002"] == "no choice of experts was seen"
