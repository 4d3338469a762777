"""ENV005: the wall clocks of nodes are apart."""

import pytest

from distdiag.checks.env.clock_skew import ClockSkew
from distdiag.events.environment import NodeClock
from distdiag.findings.finding import Severity
from distdiag.views.surroundings import NodeClocksView
from tests.checks.verdicts import findings


def view(*ahead_s, error_s=0.0):
    return NodeClocksView(
        {
            rank: NodeClock(
                rank=rank,
                seq=-1,
                time_ns=7,
                hostname=f"n{rank}",
                unix_ns=7 + int(seconds * 1e9),
                error_ns=int(error_s * 1e9),
            )
            for rank, seconds in enumerate(ahead_s)
        }
    )


def test_the_node_that_is_ahead_is_named_and_how_far():
    (finding,) = findings(ClockSkew, view(1000.0, 1042.5, 1000.1))
    assert finding.severity is Severity.INFO
    assert finding.message == (
        "the wall clocks of 3 nodes differ by 42.5 s: the clock of n1 is ahead of the clock of n0"
    )
    assert finding.subjects == ("n1", "n0")
    assert [each.summary.partition(",")[0] for each in finding.evidence] == [
        "n0 is 0.000 s ahead of n0",
        "n2 is 0.100 s ahead of n0",
        "n1 is 42.500 s ahead of n0",
    ]


@pytest.mark.parametrize("clocks", [(0.0, 0.9), (5.0, 5.0, 5.0)])
def test_clocks_that_a_time_server_keeps_are_not_reported(clocks):
    assert not findings(ClockSkew, view(*clocks))


def test_what_the_offset_may_be_off_by_is_no_skew():
    assert not findings(ClockSkew, view(0.0, 1.5, error_s=0.3))
    assert findings(ClockSkew, view(0.0, 1.7, error_s=0.3))
