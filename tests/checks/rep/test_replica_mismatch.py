import pytest

from distdiag.checks.rep.replica_mismatch import ReplicaMismatch
from distdiag.events.models import Basis, Moment
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import ZEROS, differing, replicas
from tests.checks.verdicts import findings


def test_the_rank_against_the_majority_is_named():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2, 0.1)))
    assert (finding.ranks, finding.grade) == (RankSet([2]), Grade.PROVEN)
    assert (finding.severity, finding.location.line) == (Severity.ERROR, 22)
    assert "ranks 0-1,3 / rank 2" in finding.message


def test_two_ranks_are_both_named_and_neither_is_surely_wrong():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.2)))
    assert (finding.ranks, finding.grade) == (RankSet([0, 1]), Grade.LIKELY)


def test_two_camps_of_the_same_size_are_both_named():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.2, 0.1, 0.2)))
    assert (finding.ranks, finding.grade) == (RankSet(range(4)), Grade.LIKELY)


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


def test_without_a_reason_to_compare_it_is_a_note():
    view = replicas(differing(0.1, 0.1, 0.2), basis=Basis.WORLD)
    (finding,) = findings(ReplicaMismatch, view)
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_a_part_of_a_sharded_model_that_is_not_sharded_is_likely_meant_to_be_the_same():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2), basis=Basis.MODEL))
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.ERROR)


def test_what_is_not_marked_as_a_part_may_be_one_all_the_same():
    view = replicas(differing(0.1, 0.1, 0.2), basis=Basis.MARKED)
    (finding,) = findings(ReplicaMismatch, view)
    assert finding.grade is Grade.NOTE


def test_what_the_program_reduces_itself_is_judged_at_the_first_step_too():
    step = {"moment": Moment.STEP, "basis": Basis.REDUCED}
    assert findings(ReplicaMismatch, replicas(differing(0.1, 0.2), **step))
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2), **step, alike_at=0))
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2), moment=Moment.STEP))


def test_a_frozen_model_beside_is_a_warning():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2), basis=Basis.BESIDE))
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)


@pytest.mark.parametrize("basis", [Basis.MESH, Basis.WRAPPER, Basis.REDUCED, Basis.SENT])
def test_a_mesh_a_wrapper_and_what_the_program_reduced_or_sent_prove_it(basis):
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2), basis=basis))
    assert finding.grade is Grade.PROVEN


def test_buffers_count_too():
    view = replicas(differing(0.1, 0.2, is_parameter=False, requires_grad=False))
    assert findings(ReplicaMismatch, view)


COUNTER = {"name": "num_seen", "is_parameter": False, "dtype": "int64"}


def test_whole_numbers_in_a_buffer_are_left_to_the_program_by_fsdp2():
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2, **COUNTER, keeper="FSDP2")))


@pytest.mark.parametrize(
    "change",
    [{"keeper": "DDP"}, {"is_parameter": True}, {"dtype": "float32"}],
    ids=["ddp", "parameter", "fractions"],
)
def test_other_tensors_than_buffers_of_whole_numbers_count_with_fsdp2(change):
    values = {**COUNTER, "keeper": "FSDP2", **change}
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.2, **values)))
    assert finding.subjects == ("num_seen",)


def test_local_steps_of_ddp_make_it_a_note():
    (finding,) = findings(ReplicaMismatch, replicas(differing(0.1, 0.1, 0.2), basis=Basis.UNSYNCED))
    assert finding.grade is Grade.NOTE


def test_what_looks_unwritten_is_left_to_the_check_for_that():
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.1, ZEROS)))


def test_late_parameters_are_left_to_the_check_for_them():
    assert not findings(ReplicaMismatch, replicas(differing(0.1, 0.2, is_late=True)))


def test_late_parameters_do_not_hide_others():
    view = replicas(differing(0.1, 0.2, is_late=True, name="lora"), differing(0.1, 0.2))
    (finding,) = findings(ReplicaMismatch, view)
    assert finding.subjects == ("layer.weight",)
