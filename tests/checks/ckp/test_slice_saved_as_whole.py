from distdiag.checks.ckp.slice_saved_as_whole import SliceSavedAsWhole
from distdiag.events.models import SliceSaved
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.streams import event_of, plain_site, together
from tests.checks.verdicts import findings

NAMES = ("q.lora_A", "q.lora_B")


def saved(*ranks):
    """Of four ranks that hold parts, these have saved theirs."""
    made = [
        event_of(
            SliceSaved, rank, step=9, names=NAMES, members=(0, 1, 2, 3), site=plain_site(60 + rank)
        )
        for rank in ranks
    ]
    return findings(SliceSavedAsWhole, together(*made, expected=range(4)))


def test_the_ranks_whose_parts_are_lost_are_named():
    (finding,) = saved(0)
    assert (finding.ranks, finding.grade) == (RankSet([1, 2, 3]), Grade.PROVEN)
    assert (finding.severity, finding.subjects) == (Severity.ERROR, NAMES)
    assert (finding.step, finding.location.line) == (9, 60)
    assert finding.message == (
        "rank 0 saved only its own part of q.lora_A and 1 more; the parts of ranks 1-3 were saved "
        "nowhere"
    )


def test_who_saved_is_evidence():
    (finding,) = saved(0, 2)
    assert [each.ranks for each in finding.evidence] == [RankSet([0, 2]), RankSet([1, 3])]
