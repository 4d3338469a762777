import math

import pytest

from distdiag.checks.par.unshared_metric import UnsharedMetric
from distdiag.events.data import MetricGiven
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.data import MetricView
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def judged(*values):
    fields = {"name": "ReduceLROnPlateau", "number": 3, "site": plain_site(20)}
    given = {r: event_of(MetricGiven, r, value=v, **fields) for r, v in enumerate(values)}
    return findings(UnsharedMetric, MetricView(given))


def test_values_that_differ_between_ranks_are_named():
    (finding,) = judged(0.5, 0.625)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert "0.5 on rank 0, 0.625 on rank 1" in finding.message


@pytest.mark.parametrize(
    "values",
    [(0.5, 0.5), (0.0, 0.0), (1.0, 1.00001), (math.inf, 0.5), (math.nan, math.nan)],
    ids=["the same", "nothing yet", "rounding", "not finite", "broken alike"],
)
def test_values_that_ranks_share_are_silent(values):
    assert not judged(*values)
