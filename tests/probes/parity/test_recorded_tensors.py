"""Tests of what is found out about tensors while they are recorded."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from distdiag.config.tasks import ParityTask, RankSummary
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.models import ReplicaEvidence, TensorPlan
from distdiag.probes.models.tensor_plans import Held
from distdiag.probes.parity.recorder import TensorRecorder, _rounded_to
from distdiag.record.recording import Kind, RecordingWriter, read_index


@pytest.mark.parametrize(
    ("dtype", "found"),
    [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "")],
)
def test_a_gradient_tells_what_it_was_rounded_to(dtype, found):
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert _rounded_to(tensor.to(dtype).float()) == found


def test_few_elements_and_zeros_tell_nothing():
    assert _rounded_to(torch.ones(15)) == _rounded_to(torch.zeros(100)) == ""


@pytest.mark.parametrize(
    ("evidence", "is_written"),
    [(ReplicaEvidence.WORLD, True), (ReplicaEvidence.WRAPPER, False)],
    ids=lambda v: str(v),
)
def test_ranks_of_which_nobody_knows_that_they_hold_the_same_all_write(
    tmp_path, evidence, is_written
):
    plan = TensorPlan(
        name="up",
        shape=(4,),
        dtype="float32",
        is_parameter=True,
        replicas=(0, 1),
        evidence=evidence,
    )
    writer = RecordingWriter(tmp_path, 1)
    held = [("Net/up", Held(plan, torch.ones(4)))]
    TensorRecorder(writer, 1).write(Kind.START, 0, held, lambda each: each.tensor)
    writer.close(RankSummary(rank=1, world_size=2, num_steps=0, num_batches=0))
    (record,) = read_index(tmp_path / "rank-1.index")
    assert record.digest
    assert bool(record.num_bytes) is is_written


def test_the_rest_of_sums_that_cancel_out_is_no_coarse_dtype():
    generator = torch.Generator().manual_seed(3)
    multiples = torch.randn(64, generator=generator).mul(12).round()
    assert _rounded_to(multiples * 2.0**-36) == ""


def test_a_pass_over_fake_tensors_is_no_pass_of_the_training(observed, tmp_path):
    folder, path = tmp_path / "recording", tmp_path / "task.json"
    folder.mkdir()
    ParityTask(folder=str(folder), num_steps=9).write(path)
    (probe,) = observed.install("parity", parity_task=str(path))
    for value in (3.0, 5.0):
        with FakeTensorMode():
            torch.ones(2, requires_grad=True).sum().backward()
        torch.full((1,), value, requires_grad=True).sum().backward()
    probe.flush()

    assert observed.events(ProbeDisabled) == []
    losses = [each for each in read_index(folder / "rank-0.index") if each.kind == Kind.LOSS]
    assert [(each.micro, each.values) for each in losses] == [(0, (3.0,)), (1, (5.0,))]
