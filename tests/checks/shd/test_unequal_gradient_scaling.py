import pytest

from distdiag.checks.shd.unequal_gradient_scaling import UnequalGradientScaling
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.gradients import StageScalings
from tests.checks.models import scaling
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings


def test_different_factors_are_shown_with_each_rank():
    (finding,) = findings(UnequalGradientScaling, scaling(0.25, 0.5, 0.25))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1, 2]), Grade.PROVEN)
    assert finding.severity is Severity.ERROR
    assert "from 0.25 to 0.5" in finding.message
    assert [each.values["factor"] for each in finding.evidence] == [0.25, 0.5, 0.25]


@pytest.mark.parametrize(
    "factors", [(1.0, 1.0), (0.5, 0.5, 0.5), (0.5, 0.51), (0.0, 0.0), (1 / 65536, 1 / 65536)]
)
def test_equal_factors_are_silent(factors):
    assert not findings(UnequalGradientScaling, scaling(*factors))


def test_one_rank_that_does_not_clip_at_all_is_found():
    assert findings(UnequalGradientScaling, scaling(1.0, 1.0, 0.2, 1.0))


def test_an_opposite_sign_is_found():
    assert findings(UnequalGradientScaling, scaling(0.5, -0.5))


def test_a_rank_that_throws_its_gradients_away_is_found():
    assert findings(UnequalGradientScaling, scaling(0.0, 0.5))


def stages(*steps):
    """What two stages multiply their gradients by in these steps."""
    factors = {step: dict(enumerate(by_rank)) for step, by_rank in enumerate(steps)}
    return StageScalings((0, 1), factors, dict.fromkeys((0, 1), plain_site(7)))


def test_stages_that_are_clipped_apart_are_reported():
    (finding,) = findings(UnequalGradientScaling, stages((1.0, 0.2), (1.0, 0.5), (1.0, 1.0)))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert finding.ranks == RankSet([0, 1])
    assert finding.location.line == 7
    assert "before step 0: from 0.2 to 1" in finding.message


@pytest.mark.parametrize(
    "steps",
    [
        ((0.2, 0.2), (0.5, 0.5)),
        ((1.0, 0.5), (1.0, 0.5), (1.0, 0.5)),
        ((1.0, 0.2), (1.0, 1.0)),
        (),
    ],
    ids=["together", "by constants", "in one step", "never seen"],
)
def test_stages_may_scale(steps):
    assert not findings(UnequalGradientScaling, stages(*steps))
