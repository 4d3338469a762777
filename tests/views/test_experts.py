"""Routers, and whether they know more experts than a rank has."""

import pytest

from distdiag.views.experts import spreading_routers
from tests.checks.models import plan


def layer(experts, num_total=4, router="moe.gate.weight", shape=(8, 8)):
    return [plan(router, shape=(num_total, 8)), *(plan(name, shape=shape) for name in experts)]


@pytest.mark.parametrize(
    "plans",
    [
        layer(["moe.experts.0.up", "moe.experts.0.down", "moe.experts.1.up"]),
        layer(["moe.experts.local_experts.0.up", "moe.experts.local_experts.1.up"]),
        layer(["moe.experts.up"], shape=(2, 8, 8)),
        layer(["experts.0.up"], router="gate.weight"),
    ],
    ids=["listed", "in a list of their own", "stacked", "outermost"],
)
def test_a_router_that_knows_more_experts_than_there_are_is_found(plans):
    assert spreading_routers(plans) == {plans[0].name}


@pytest.mark.parametrize(
    "plans",
    [
        layer(["moe.experts.0.up", "moe.experts.1.up"], num_total=2),
        layer(["moe.experts.up"], shape=(4, 8, 8)),
        layer(["other.experts.0.up"]),
    ],
    ids=["as many", "as many stacked", "in another layer"],
)
def test_others_are_not(plans):
    assert not spreading_routers(plans)
