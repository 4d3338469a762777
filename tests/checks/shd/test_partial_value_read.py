from distdiag.checks.shd.partial_value_read import PartialValueRead
from distdiag.events.models import PartialRead
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def test_the_line_that_reads_is_named():
    event = event_of(
        PartialRead, 1, step=2, api="item", placements=("R", "P(sum)"), site=plain_site(50)
    )
    (finding,) = findings(PartialValueRead, event)
    assert (finding.ranks, finding.step, finding.location.line) == (RankSet([1]), 2, 50)
    assert finding.grade is Grade.LIKELY
    assert "item() gives rank 1 its own part of a value with placement R, P(sum)" in finding.message
