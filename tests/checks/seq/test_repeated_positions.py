import pytest

from distdiag.checks.seq.repeated_positions import RepeatedPositions
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.sequences import PositionedSequences
from tests.checks.sequences import both, passed, shared
from tests.checks.verdicts import findings


def judged(*passes):
    return findings(RepeatedPositions, shared(*passes, kind=PositionedSequences))


def placed(number, *positions, **values):
    """One pass of two ranks, which place their tokens so."""
    return [passed(rank, number, positions=positions[rank], **values) for rank in (0, 1)]


ALIKE = ("cos", "sin"), ("cos", "sin")


def test_parts_that_all_begin_at_the_same_position_are_named():
    (finding,) = judged(placed(0, *ALIKE), placed(1, *ALIKE))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert "hold different tokens, but the same positions: in 2 of 2 passes" in finding.message
    assert finding.evidence[0].values == {"contents": "cos sin"}


@pytest.mark.parametrize(
    "passes",
    [
        [placed(n, ("0-9",), ("10-19",)) for n in (0, 1)],
        [placed(0, *ALIKE), placed(1, ("cos", "sin"), ("other", "other"))],
        [placed(n, ("cos", ""), ("cos", "")) for n in (0, 1)],
        [placed(n, ("rows 0-7", "columns"), ("rows 8-15", "columns")) for n in (0, 1)],
        [placed(n, *ALIKE, given=("the same tokens",)) for n in (0, 1)],
        [placed(n, *ALIKE, given=()) for n in (0, 1)],
        [both(n) for n in (0, 1)],
        [placed(0, *ALIKE)],
    ],
    ids=[
        "parts",
        "once",
        "unread",
        "one axis of an image",
        "same tokens",
        "unknown tokens",
        "none",
        "one pass",
    ],
)
def test_positions_that_differ_or_say_nothing_are_not(passes):
    assert judged(*passes) == []


def test_what_may_move_positions_on_makes_it_a_note():
    first, second = (placed(n, *ALIKE, doubt="rotated may move positions on") for n in (0, 1))
    (finding,) = judged(first, second)
    assert finding.severity is Severity.INFO
    assert "was expected; but rotated may move positions on" in finding.message
