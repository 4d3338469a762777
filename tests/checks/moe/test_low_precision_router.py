import pytest

from distdiag.checks.moe.low_precision_router import LowPrecisionRouter
from distdiag.findings.finding import Severity
from tests.checks.routing import routing, view
from tests.checks.verdicts import findings


def judged(**values):
    return findings(LowPrecisionRouter, view(routing(**values)))


def test_ties_of_a_coarse_type_are_reported():
    (finding,) = judged(dtype="bfloat16", tie_share=0.068)
    assert finding.severity is Severity.INFO
    assert "scores of bfloat16" in finding.message
    assert "7% of the tokens" in finding.message


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float32", "tie_share": 0.5},
        {"dtype": "bfloat16", "tie_share": 0.001},
        {"dtype": "bfloat16", "tie_share": -1.0},
    ],
    ids=["a fine type", "hardly any ties", "nothing known"],
)
def test_other_routers_are_silent(values):
    assert not judged(**values)


def test_what_an_auxiliary_loss_looks_up_is_no_choice_of_a_router():
    looked_up = routing(layer="", dtype="bfloat16", tie_share=0.07)
    routed = routing(layer="layers.0.gate")
    assert not findings(LowPrecisionRouter, view(looked_up, routed))
    assert findings(LowPrecisionRouter, view(looked_up))


def test_a_layer_beside_others_is_judged_by_itself():
    coarse = routing(layer="layers.1", dtype="bfloat16", tie_share=0.07)
    found = findings(LowPrecisionRouter, view(coarse, routing(layer="layers.10.gate")))
    assert [finding.subjects for finding in found] == [("layers.1",)]
