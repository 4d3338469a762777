import pytest

from distdiag.checks.moe.idle_experts import IdleExperts
from distdiag.events.routing import Load
from distdiag.findings.finding import Severity
from tests.checks.routing import routing, view
from tests.checks.verdicts import findings

IDLE = Load(2.0, 0.25)
PEAK = Load(5.0, 0.0)


def judged(*loads, **values):
    samples = [routing(step=step, load=load, **values) for step, load in enumerate(loads)]
    return findings(IdleExperts, view(*samples))


@pytest.mark.parametrize("load", [IDLE, PEAK], ids=["idle", "overloaded"])
def test_what_is_uneven_at_each_look_is_reported(load):
    (finding,) = judged(load, load, load)
    assert (finding.severity, finding.subjects) == (Severity.INFO, ("layers.0.gate",))
    assert f"{load.peak:.1f} times its share" in finding.evidence[0].summary


def test_tokens_beyond_the_capacity_are_reported_with_their_share():
    (finding,) = judged(*[Load(1.5, 0.0, 0.12)] * 3)
    assert finding.severity is Severity.INFO
    assert "drops tokens (up to 12% of the choices)" in finding.message
    assert "12% of the choices are dropped" in finding.evidence[0].summary
    assert finding.evidence[0].values["dropped_share"] == 0.12


@pytest.mark.parametrize(
    ("loads", "values"),
    [
        ((IDLE, IDLE), {}),
        ((IDLE, Load(1.0, 0.0), IDLE), {}),
        ((IDLE, IDLE, IDLE), {"num_tokens": 16}),
        ((None, None, None), {}),
        ([Load(1.5, 0.0, 0.001)] * 3, {}),
    ],
    ids=["too few samples", "not always", "too few tokens", "not of experts", "few are dropped"],
)
def test_other_loads_are_silent(loads, values):
    assert not judged(*loads, **values)
