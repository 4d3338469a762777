import pytest

from distdiag.checks.shd.combined_shards import CombinedShards
from distdiag.events.models import ShardsCombined
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.updates import ShardsView
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


@pytest.mark.parametrize(
    ("is_gradient", "reduce_op", "words"),
    [
        (True, "SUM", "over ranks 0-1 reduces (SUM) the gradient of up.weight, of which"),
        (False, "", "over ranks 0-1 broadcasts up.weight, of which"),
    ],
)
def test_shards_that_are_combined_are_reported_at_the_call(is_gradient, reduce_op, words):
    events = {
        rank: event_of(
            ShardsCombined,
            rank,
            parameter="up.weight",
            is_gradient=is_gradient,
            ranks=(0, 1),
            reduce_op=reduce_op,
            site=plain_site(8),
        )
        for rank in (0, 1)
    }
    (finding,) = findings(CombinedShards, ShardsView(events))
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.ERROR)
    assert finding.location.line == 8
    assert words in finding.message
