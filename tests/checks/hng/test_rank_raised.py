from dataclasses import replace

import pytest

from distdiag.checks.hng.rank_raised import RankRaised
from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK
from distdiag.views.alignment import Trigger
from distdiag.views.rank_states import JobView, RankStatus
from tests.checks.streams import TORCH, Job, library, plain_site, signature
from tests.checks.verdicts import codes, findings

LINE = Frame("train.py", 7, "main")
CLOSED = "[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3141"


def judged(job):
    return findings(RankRaised, job.view())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_exception_that_others_wait_behind_is_named(num_ranks):
    job = Job(num_ranks)
    for rank in job.world - RankSet([1]):
        job.call(rank)
    job.fail(1, 5, LINE)
    (finding,) = judged(job)
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 7)
    assert "ValueError: bad" in finding.message


@pytest.mark.parametrize("message", [CLOSED, "Timed out waiting 1000ms", "Broken pipe"])
def test_errors_about_a_lost_peer_are_consequences_even_when_they_come_first(message):
    job = Job(3)
    job.every()
    job.fail(2, 9, LINE)
    for rank in (0, 1):
        job.lose_peer(rank, 5, message)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([2])


def test_the_earlier_of_two_exceptions_is_the_cause():
    job = Job(3)
    job.call(2)
    job.fail(0, 9, Frame("train.py", 50, "main"), kind="KeyError")
    job.fail(1, 5, LINE)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])


def test_the_same_exception_on_all_ranks_is_one_note_that_blames_no_difference_of_data():
    job = Job()
    job.fail(0, 5, LINE, message="no batch for rank 0")
    job.fail(1, 9, LINE, message="no batch for rank 1")
    (finding,) = judged(job)
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.INFO)
    assert "all 2 ranks raised ValueError" in finding.message
    assert "differs" not in finding.fix and "lost their connection" not in finding.why
    messages = [evidence.summary for evidence in finding.evidence]
    assert messages == [f"raised ValueError: no batch for rank {rank}" for rank in (0, 1)]


def test_a_rank_that_cannot_reach_the_master_is_the_cause_and_not_a_consequence():
    job = Job()
    init = library("torch/distributed/distributed_c10d.py", "init_process_group")
    store = library("torch/distributed/rendezvous.py", "_create_c10d_store")
    message = "The client socket has timed out after 8000ms while trying to connect to (h, 9)."
    job.fail(1, 5, store, init, LINE, kind="torch.distributed.DistNetworkError", message=message)
    job.set(0, status=RankStatus.DIED, left_ns=7, exit_status=-15)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])
    assert "trying to connect to (h, 9)" in finding.message
    assert "MASTER_PORT" in finding.fix and "data" not in finding.fix
    assert codes(job.view()) == ["HNG001"]


def test_who_waited_in_vain_for_a_rank_to_join_is_reported_where_nothing_else_is_known():
    job = Job()
    init = library("torch/distributed/distributed_c10d.py", "init_process_group")
    message = "wait timeout after 8 s"
    job.fail(0, 5, init, LINE, kind="torch.distributed.DistStoreError", message=message)
    job.set(1, status=RankStatus.DIED, left_ns=7, exit_status=-15)
    (finding,) = judged(job)
    assert finding.ranks == RankSet()  # it is the victim of whoever did not come
    assert finding.message.startswith("rank 0 raised torch.distributed.DistStoreError")


def test_a_long_traceback_keeps_its_last_frames_and_its_exception():
    job = Job()
    frames = "".join(f'  File "lib.py", line {n}, in call\n    call({n})\n' for n in range(2_000))
    text = f"Traceback (most recent call last):\n{frames}ValueError: the end"
    job.fail(0, 5, LINE, traceback=text)
    job.set(1, status=RankStatus.DIED, left_ns=9)
    (finding,) = judged(job)
    shown = finding.evidence[0].values["traceback"]
    assert len(shown) <= LONGEST_TRACEBACK
    assert shown.startswith("Traceback (most recent call last)")
    assert shown.endswith("call(1999)\nValueError: the end")


def test_a_rank_that_still_runs_may_be_about_to_raise_the_same():
    job = Job()
    job.fail(0, 5, LINE)
    assert not judged(job)
    job.set(1, status=RankStatus.DIED, left_ns=9)
    assert judged(job)


def test_an_interruption_by_the_user_is_a_note():
    job = Job()
    job.fail(0, 5, LINE, kind="KeyboardInterrupt", message="")
    job.set(1, status=RankStatus.DIED, left_ns=9)
    (finding,) = judged(job)
    assert finding.severity is Severity.INFO


def test_an_error_of_a_contradictory_collective_is_left_to_that_contradiction():
    job = Job()
    for rank in job.world:
        job.call(rank, sign=signature(numel=4 + rank))
    job.lose_peer(0, 5, "op.preamble.length <= op.nbytes. 20 vs 16")
    assert not judged(job)
    assert codes(job.alignment()) == ["COL003"]


def test_an_error_in_the_user_s_own_line_is_no_consequence_of_an_earlier_contradiction():
    job = Job()
    for rank in job.world:
        job.call(rank, sign=signature(reduce_op="SUM" if rank else "MAX"))
    job.call(1)
    job.fail(0, 5, LINE)
    assert [f.ranks for f in judged(job)] == [RankSet([0])]


def test_both_ways_to_see_it_give_one_finding():
    job = Job()
    job.call(0, plain_site(3))
    job.fail(1, 5, LINE)
    alignment = job.alignment(trigger=Trigger.LEFT)
    (early,) = findings(RankRaised, alignment)
    (late,) = judged(job)
    assert early.identity == late.identity


def test_no_exception_is_silent():
    job = Job()
    job.every()
    job.set(0, 1, status=RankStatus.FINISHED)
    assert not judged(job)


def test_a_rank_of_which_only_a_log_is_known_may_have_had_peers():
    job = Job(1)
    job.fail(0, 5, LINE)
    (whole,) = judged(job)
    job.set(0, is_reported_only=True)
    (part,) = judged(job)
    assert (whole.severity, part.severity) == (Severity.INFO, Severity.ERROR)
    assert "show no other rank" in part.why


def test_a_process_without_a_rank_is_called_by_its_name():
    job = Job(2)
    job.fail(0, 5, LINE)
    job.set(1, status=RankStatus.DIED, left_ns=9)
    job.set(0, label="worker pid=7")
    (finding,) = judged(job)
    assert finding.message.startswith("worker pid=7 raised ValueError: bad")


def test_what_logs_tell_without_an_order_is_reported_of_each():
    job = Job(2)
    job.fail(0, 5, LINE)
    job.fail(1, 5, Frame("train.py", 9, "main"), kind="KeyError")
    job.set(0, 1, is_reported_only=True)
    found = judged(job)
    assert [f.ranks for f in found] == [RankSet([0]), RankSet([1])]
    assert {f.grade for f in found} == {Grade.LIKELY}


def test_a_lost_peer_is_reported_only_where_nothing_else_is_known():
    job = Job(2)
    job.every()
    job.lose_peer(0, 5, CLOSED)
    job.lose_peer(1, 9, CLOSED)
    assert not judged(job)
    (finding,) = findings(RankRaised, replace(job.view(), is_unexplained=True))
    assert (finding.ranks, finding.severity) == (RankSet(), Severity.WARNING)
    assert "rank 0 lost a peer" in finding.message or "ranks 0-1 lost a peer" in finding.message
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in finding.fix


def test_nccl_s_last_error_is_the_cause_and_its_explanation_is_none():
    job = Job(2)
    message = (
        "NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21.5\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-a1 (size 9)"
    )
    init = library("torch/distributed/distributed_c10d.py", "barrier")
    job.fail(0, 5, init, LINE, kind="DistBackendError", message=message)
    job.set(1, status=RankStatus.DIED, left_ns=9, exit_status=-15)
    (finding,) = judged(job)
    assert "DistBackendError: Error while creating shared memory segment" in finding.message
    assert "/dev/shm is full or too small" in finding.why


FULL = (
    "NCCL error in: NCCLUtils.hpp:268, unhandled system error, NCCL version 2.21.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
    "Last error:\nError while creating shared memory segment /dev/shm/nccl-a1 (size 9637888)"
)


def test_a_known_fault_is_explained_by_its_row():
    job = Job()
    job.fail(0, 5, TORCH, LINE, kind="torch.distributed.DistBackendError", message=FULL)
    job.set(1, status=RankStatus.DIED, left_ns=7, exit_status=-15)
    (finding,) = judged(job)
    assert (finding.ranks, finding.severity) == (RankSet([0]), Severity.ERROR)
    assert "/dev/shm is full or too small (known fault nccl-shm-full)" in finding.message
    assert "--shm-size" in finding.fix and finding.why.startswith("/dev/shm is full")
    rows = [e.values["known_fault"] for e in finding.evidence if "known_fault" in e.values]
    assert rows == ["nccl-shm-full"]


def test_a_fault_of_the_machine_on_all_ranks_is_no_note():
    job = Job()
    for rank in job.world:
        job.fail(rank, 5, TORCH, LINE, kind="DistBackendError", message=FULL)
    (finding,) = judged(job)
    assert (finding.ranks, finding.severity) == (RankSet([0, 1]), Severity.ERROR)


def test_a_known_consequence_hides_no_cause():
    job = Job()
    gone = "NCCL error in: x.cpp:1, remote process exited or there was a network error"
    job.lose_peer(0, 3, gone)
    job.fail(1, 5, LINE)
    (finding,) = judged(job)
    assert (finding.ranks, finding.fix) == (RankSet([1]), RankRaised.fix)


def test_a_known_fault_is_a_cause_though_it_speaks_of_sockets():
    job = Job()
    nowhere = "NCCL error, internal error\nLast error:\nBootstrap : no socket interface found"
    job.fail(1, 3, TORCH, LINE, kind="DistBackendError", message=nowhere)
    job.lose_peer(0, 5)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([1])
    assert "NCCL_SOCKET_IFNAME" in finding.fix


def test_what_may_come_of_a_lost_peer_hides_no_cause():
    job = Job(3)
    refused = "NCCL error: socketStartConnect: Connect to 10.0.0.2<5> failed : Connection refused"
    job.fail(0, 3, TORCH, LINE, kind="DistBackendError", message=refused)
    job.fail(2, 5, LINE)
    job.lose_peer(1, 6)
    (finding,) = judged(job)
    assert finding.ranks == RankSet([2])


SIZES = "The size of tensor a (6) must match the size of tensor b (12) at non-singleton dimension 1"


def after(op, message=SIZES):
    job = Job(2)
    job.every(op=op)
    for rank in (0, 1):
        job.fail(rank, 5, LINE, kind="RuntimeError", message=message)
        job.set(rank, last_call=job.calls[rank][-1])
    (finding,) = findings(RankRaised, JobView(job.states))
    return finding


def test_a_size_that_is_wrong_by_the_ranks_of_a_gather_is_no_fault_of_one_rank_alone():
    finding = after("all_gather")
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.LIKELY)
    assert "along a different dimension" in finding.why
    assert any("12 is 6 times the 2 ranks of all_gather" in e.summary for e in finding.evidence)


@pytest.mark.parametrize(
    ("op", "message"),
    [("all_reduce", SIZES), ("all_gather", SIZES.replace("12", "13")), ("all_gather", "bad")],
)
def test_other_errors_of_all_ranks_stay_notes(op, message):
    assert after(op, message).grade is Grade.NOTE
