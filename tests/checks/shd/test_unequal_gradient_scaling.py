import pytest

from distdiag.checks.shd.unequal_gradient_scaling import UnequalGradientScaling
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import scaling
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
