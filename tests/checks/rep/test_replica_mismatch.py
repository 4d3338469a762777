import pytest

from distdiag.checks.rep.replica_mismatch import ReplicaMismatch
from distdiag.events.models import Moment, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import ZEROS, differing, replicas
from tests.checks.verdicts import findings


def test_the_rank_against_the_majority_is_named():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2, 0.1)))
    assert (finding.ranks, finding.grade) == (RankSet([2]), Grade.PROVEN)
    assert (finding.severity, finding.location.line) == (Severity.ERROR, 22)
    assert "ranks 0-1,3 / rank 2" in finding.message


@pytest.mark.parametrize("held", [(0.1, 0.2), (0.1, 0.2, 0.1, 0.2)])
def test_groups_of_the_same_size_are_both_named_and_neither_is_surely_wrong(held):
    (finding,) = findings(ReplicaMismatch, replicas(differing(*held)))
    assert (finding.ranks, finding.grade) == (RankSet(range(len(held))), Grade.LIKELY)


BASES = {
    **dict.fromkeys(
        (
            ReplicaEvidence.MESH,
            ReplicaEvidence.WRAPPER,
            ReplicaEvidence.REDUCED,
            ReplicaEvidence.SENT,
        ),
        (Severity.ERROR, Grade.PROVEN),
    ),
    ReplicaEvidence.MODEL: (Severity.ERROR, Grade.LIKELY),
    ReplicaEvidence.FROZEN: (Severity.WARNING, Grade.LIKELY),
    **dict.fromkeys(
        (ReplicaEvidence.WORLD, ReplicaEvidence.MARKED, ReplicaEvidence.UNSYNCED),
        (Severity.INFO, Grade.NOTE),
    ),
}


@pytest.mark.parametrize("evidence", BASES)
def test_the_reason_to_compare_decides_how_sure_it_is(evidence):
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2), evidence=evidence))
    assert (finding.severity, finding.grade) == BASES[evidence]


def test_where_nothing_says_that_ranks_share_a_tensor_nothing_says_that_they_should():
    held = differing(0.1, 0.2)
    (guess,) = findings(ReplicaMismatch, replicas(held, evidence=ReplicaEvidence.WORLD))
    assert "hold different values from the start" in guess.message
    assert (guess.confidence, guess.fix[:7]) == (0.3, "Nothing")
    (known,) = findings(ReplicaMismatch, replicas(held, evidence=ReplicaEvidence.MESH))
    assert "should hold the same values but differ from the start" in known.message


@pytest.mark.parametrize(
    "tensor",
    [differing(0.1, 0.1, ZEROS), differing(0.1, 0.2, is_late=True)],
    ids=["unwritten", "late"],
)
def test_what_other_checks_explain_is_left_to_them(tensor):
    assert not findings(ReplicaMismatch, replicas(tensor))


def test_one_finding_names_all_tensors_and_counts_them():
    tensors = [differing(0.1, 0.2, name=f"layers.{number}.weight") for number in range(12)]
    (finding,) = findings(ReplicaMismatch, replicas(*tensors, num_compared=30))
    assert finding.subjects == tuple(f"layers.{number}.weight" for number in range(12))
    assert "layers.0.weight and 11 more of DDP Net" in finding.message
    assert "12 of 30 tensors of DDP Net differ" in finding.evidence[-1].summary
    assert len(finding.evidence) == 5 * 2 + 1


def test_the_evidence_holds_digest_and_figures_of_each_camp():
    tensor = differing(0.1, 0.1, 0.2)
    (finding,) = findings(ReplicaMismatch, replicas(tensor))
    assert [each.ranks for each in finding.evidence[:2]] == [RankSet([0, 1]), RankSet([2])]
    assert finding.evidence[1].values["digest"] == tensor.by_rank[2].digest
    assert "mean 0.2, from -0.8 to 1.2" in finding.evidence[1].summary


def test_what_the_program_reduces_itself_is_judged_at_the_first_step_too():
    step = {"moment": Moment.STEP, "evidence": ReplicaEvidence.REDUCED}
    assert findings(ReplicaMismatch, replicas(differing(0.1, 0.2), **step))
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2), **step, alike_at=0))
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2), moment=Moment.STEP))


def test_buffers_count_too():
    view = replicas(differing(0.1, 0.2, is_parameter=False, requires_grad=False))
    assert findings(ReplicaMismatch, view)


COUNTER = {"name": "num_seen", "is_parameter": False, "dtype": "int64"}


def test_whole_numbers_in_a_buffer_are_left_to_the_program_by_fsdp2():
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2, **COUNTER, wrapper="FSDP2")))


@pytest.mark.parametrize(
    "change",
    [{"wrapper": "DDP"}, {"is_parameter": True}, {"dtype": "float32"}],
    ids=["ddp", "parameter", "fractions"],
)
def test_other_tensors_than_buffers_of_whole_numbers_count_with_fsdp2(change):
    values = {**COUNTER, "wrapper": "FSDP2", **change}
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.2, **values)))
    assert finding.subjects == ("num_seen",)


def test_late_parameters_do_not_hide_others():
    view = replicas(differing(0.1, 0.2, is_late=True, name="lora"), differing(0.1, 0.2))
    (finding,) = findings(ReplicaMismatch, view)
    assert finding.subjects == ("layer.weight",)
