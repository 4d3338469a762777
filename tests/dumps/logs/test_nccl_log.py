"""What the NCCL watchdog, gloo and the store say, as the logs of several torch releases have it."""

import pytest

from distdiag.dumps.logs.nccl_log import NcclLog
from tests.dumps.reading import events, sample, text

TIMEOUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(OpType=X, Timeout(ms)=1) "
    "ran for 2 milliseconds"
)


def only(line):
    ((rank, (event,)),) = events(NcclLog(), text(line)).items()
    return rank, event.source, event.values


def test_a_timeout_and_the_status_after_it_are_one():
    (event,) = events(NcclLog(), sample("nccl.log"))[1]
    assert event.source == "nccl-log"
    assert event.summary.startswith(
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8"
    )
    assert event.values == {
        "kind": "timeout",
        "seq": 808,
        "op": "ALLREDUCE",
        "numel_in": 9801523,
        "numel_out": 9801523,
        "timeout_ms": 600000,
        "ran_ms": 600020,
        "group": "default_pg",
        "group_rank": 1,
        "last_enqueued": 811,
        "last_completed": 807,
    }


def test_the_rank_of_the_job_is_not_the_rank_within_a_group():
    (event,) = events(NcclLog(), sample("nccl.log"))[4]
    assert event.values == {
        "kind": "watchdog-stuck",
        "group": "5",
        "group_rank": 0,
        "stuck_s": 600,
    }


def test_without_a_prefix_the_rank_is_that_of_the_default_group():
    (event,) = events(NcclLog(), sample("nccl.log"))[7]
    assert (event.values["seq"], event.values["last_completed"]) == (64088, 460630)


def test_where_the_failed_collective_was_called_is_reported():
    (event,) = events(NcclLog(), sample("nccl.log"))[3]
    location = [event.values[name] for name in ("file", "line", "function")]
    assert location == ["/home/me/train.py", 12, "train"]


def test_mixed_stacks_are_nobodys():
    head = "[rank{}]:[E1 P.cpp:733] Stack trace of the failed collective: "
    timeout = f"[rank{{}}]:[E1 P] [Rank 0] {TIMEOUT}"
    frame = "#{} step from /home/me/train.py:{}"
    log = text(
        head.format(0),
        head.format(1),
        frame.format(0, 11),
        frame.format(0, 12),
        frame.format(1, 13),
        timeout.format(0),
        timeout.format(1),
    )
    found = events(NcclLog(), log)
    assert "file" not in found[0][0].values
    assert found[1][0].values["line"] == 11


@pytest.mark.parametrize(
    ("line", "rank", "source", "values"),
    [
        (
            "[rank2]:[E9 P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal "
            "due to a collective timeout from  rank 6 and we will try our best to dump the "
            "debug info. Last enqueued NCCL work: 31, last completed NCCL work: 30.This",
            2,
            "nccl-log",
            {
                "kind": "dump-signal",
                "from_rank": 6,
                "last_enqueued": 31,
                "last_completed": 30,
                "group": "default_pg",
                "group_rank": 2,
            },
        ),
        (
            "[rank3]:[E9 P.cpp:1] [PG 0 (default_pg) Rank 3] Timeout at NCCL work: 2070, "
            "last enqueued NCCL work: 2082, last completed NCCL work: 2069.",
            3,
            "nccl-log",
            {
                "kind": "status",
                "seq": 2070,
                "last_enqueued": 2082,
                "last_completed": 2069,
                "group": "default_pg",
                "group_rank": 3,
            },
        ),
        (
            "[rank0]: RuntimeError: [/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
            "waiting 6000ms for recv operation to complete",
            0,
            "gloo-log",
            {"kind": "timeout", "timeout_ms": 6000, "op": "recv"},
        ),
        (
            "[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
            "Connection closed by peer [10.0.0.7]:13704",
            0,
            "gloo-log",
            {"kind": "peer-gone", "error": "Connection closed by peer", "peer": "10.0.0.7"},
        ),
        (
            "[rank0]: RuntimeError: Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms",
            0,
            "gloo-log",
            {"kind": "monitored-barrier", "missing_ranks": "1, 3", "timeout_ms": 5000},
        ),
        (
            "[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, "
            "keys: /default_pg/0//cpu",
            1,
            "store-log",
            {"kind": "timeout", "timeout_ms": 300000, "keys": "/default_pg/0//cpu"},
        ),
        (
            "[rank0]: DistStoreError: Timed out after 61 seconds waiting for clients. "
            "1/2 clients joined.",
            0,
            "store-log",
            {"kind": "clients-missing", "timeout_s": 61, "num_here": 1, "num_expected": 2},
        ),
        (
            "node7:534:1763 [3] NCCL WARN NET/IB : Got completion from peer with status=12",
            None,
            "nccl-log",
            {"kind": "nccl-warning", "error": "NET/IB : Got completion from peer with status=12"},
        ),
    ],
)
def test_a_message(line, rank, source, values):
    assert only(line) == (rank, source, values)


def test_a_message_that_is_repeated_is_reported_once():
    line = "[rank0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms"
    assert len(events(NcclLog(), text(*[line] * 1000))[0]) == 1


def test_what_nobody_signed_is_left_out_where_others_sign():
    unsigned = f"  what():  [PG 3 Rank 5] {TIMEOUT}"
    assert list(events(NcclLog(), text(unsigned))) == [None]
    assert list(events(NcclLog(), text(unsigned, "[rank6]: " + unsigned))) == [6]


def test_ordinary_logs_are_not_recognised():
    assert not NcclLog().recognises(text("step 1 loss 0.3", "NCCL version 2.28.9"))
