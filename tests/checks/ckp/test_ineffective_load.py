from distdiag.checks.ckp.ineffective_load import IneffectiveLoad
from distdiag.events.checkpoints import Waste
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.loads import wasted
from tests.checks.streams import together
from tests.checks.verdicts import findings


def found(*ranks, waste=Waste.UNUSED):
    loads = [wasted(rank, waste) for rank in ranks]
    return findings(IneffectiveLoad, together(*loads, expected=(0, 1)))


def test_what_was_read_and_never_put_into_the_model_is_proven():
    (finding,) = found(0, 1)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.PROVEN)
    assert finding.message.startswith("dcp.load read tensors for 0.weight and 1 more of Net")


def test_what_was_written_over_on_the_first_rank_is_likely():
    (finding,) = found(0, waste=Waste.OVERWRITTEN)
    assert (finding.grade, finding.ranks) == (Grade.LIKELY, RankSet([0]))


def test_what_a_broadcast_replaced_on_other_ranks_is_a_note():
    (finding,) = found(1, waste=Waste.OVERWRITTEN)
    assert finding.grade is Grade.NOTE
