"""Lines of known faults: whose they are, which is the first, and what was survived."""

import pytest

from distdiag.dumps.logs.known_fault_lines import KnownFaultLines
from distdiag.dumps.logs.traceback_text import SURVIVED_AFTER
from tests.dumps.reading import events, text

FULL = "n1:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-U to 9 bytes"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def faults(*lines, **options):
    found = events(KnownFaultLines(), text(*lines, **options))
    return {rank: [event.fault for event in each] for rank, each in found.items()}


def only(*lines):
    ((event,),) = events(KnownFaultLines(), text(*lines)).values()
    return event


def test_each_rank_has_its_faults_in_the_order_of_their_lines():
    found = faults(
        f"[rank1]: {MEMORY}",
        f"[rank0]: {FULL}",
        f"[rank1]: {MEMORY}",
        "[rank1]: RuntimeError: CUDA error: device-side assert triggered",
    )
    assert found == {1: ["cuda-out-of-memory", "cuda-device-side-assert"], 0: ["nccl-shm-full"]}


def test_places_tell_which_line_came_first():
    found = events(KnownFaultLines(), text(f"[rank1]: {MEMORY}", f"[rank0]: {FULL}"))
    assert found[1][0].place < found[0][0].place


def test_a_line_without_a_rank_is_kept_without_one():
    assert faults(FULL) == {None: ["nccl-shm-full"]}


def test_what_nccl_warns_of_once_more_on_its_way_up_is_no_fault_of_its_own():
    inner = "n1:7:8 [0] include/shm.h:42 NCCL WARN Cuda failure 'invalid argument'"
    outer = (
        "n1:7:8 [0] include/shm.h:67 NCCL WARN Error while creating shared memory segment nccl-a"
    )
    way = "n1:7:8 [0] NCCL INFO include/shm.h:55 -> 1"
    assert faults(inner, way, "", outer) == {None: ["nccl-cuda-error"]}
    tagged = [f"[1,3]<stdout>:{line}" for line in (inner, way, "", outer)]
    assert faults(*tagged) == {3: ["nccl-cuda-error"]}
    assert faults(way, outer) == {None: ["nccl-shm-full"]}
    other = inner.replace("n1:7:8", "n1:9:9")
    assert "nccl-shm-full" in faults(other, way, outer)[None]
    assert "nccl-shm-full" in faults(inner, "step 3 loss 2.1", outer)[None]


def test_the_text_and_the_file_are_reported():
    event = only("step 1", f"[rank3]: {FULL}")
    assert (event.text, event.file, event.rank) == (FULL, "train.log", 3)


@pytest.mark.parametrize(("number", "was_survived"), [(SURVIVED_AFTER, True), (9, False)])
def test_a_process_that_writes_on_has_survived(number, was_survived):
    steps = [f"[rank0]: step {n} loss 2.5" for n in range(number)]
    assert only(f"[rank0]: {MEMORY}", *steps).was_survived is was_survived


def test_lines_of_a_dying_process_are_no_sign_of_life():
    frames = [f"[rank0]: frame #{n}: c10::Error::Error()" for n in range(SURVIVED_AFTER + 9)]
    frames += [f"[rank0]:   File '/x.py', line {n}" for n in range(SURVIVED_AFTER + 9)]
    assert not only(f"[rank0]: {MEMORY}", *frames).was_survived


def test_other_ranks_that_write_on_are_no_sign_of_life():
    steps = [f"[rank1]: step {n} loss 2.5" for n in range(SURVIVED_AFTER + 9)]
    assert not only(f"[rank0]: {MEMORY}", *steps).was_survived


def test_the_kernel_survives_what_it_reports():
    xid = "kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    later = [f"kernel: eth{n} is up" for n in range(SURVIVED_AFTER + 9)]
    assert not only(xid, *later).was_survived


def test_warnings_and_healthy_lines_are_no_faults():
    lines = [
        "WARNING:root:CUDA out of memory. Tried to allocate 2.00 GiB, retrying after this error",
        "step 12 error 0.3 failed 0 killed 0",
        "[W socket.cpp:464] The server socket has failed to bind (Address already in use).",
    ]
    assert faults(*lines) == {}


def test_a_log_without_a_sign_is_not_read():
    assert not KnownFaultLines().recognises(text("step 1 loss 2.5", "step 2 loss 2.4"))
