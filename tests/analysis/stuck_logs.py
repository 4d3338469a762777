"""Logs, stacks and messages of made-up jobs that got stuck, in formats of many releases.

The formats are those of torch's C++ sources (ProcessGroupNCCL.cpp, TraceUtils.h,
ProcessGroupWrapper.cpp, ProcessGroupGloo.cpp), of torch_npu, py-spy, gdb, lldb and faulthandler;
all values are made up. `CASES` has the truth of each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.analysis.failed_logs import summary


@dataclass(frozen=True)
class Case:
    """What lies in a folder, and what is true of it: a code with its culprits, or nothing bad.

    `words` stand in the message; `certainty` and `location` are compared where they are given.
    """

    name: str
    files: dict[str, str]
    code: str | None
    culprits: str = ""
    words: tuple[str, ...] = ()
    certainty: str = ""
    location: str = ""


CASES: list[Case] = []


def case(name, lines, code, culprits="", *words, certainty="", location=""):
    files = lines if isinstance(lines, dict) else {"train.log": lines}
    texts = {
        path: text if isinstance(text, str) else "\n".join(text) + "\n"
        for path, text in files.items()
    }
    CASES.append(Case(name, texts, code, culprits, words, certainty, location))


# The watchdog of NCCL, one writer for each generation of its messages.


WORK = {
    "op": "ALLREDUCE",
    "size": 64,
    "out": None,
    "seq": 41,
    "enqueued": 43,
    "completed": 40,
    "group": "PG ID 0 PG GUID 0(default_pg)",
    "place": None,
    "prefix": None,
}


def work(rank, how):
    """The values of a message, with what follows from others."""
    values = WORK | how
    values["out"] = values["out"] or values["size"]
    values["place"] = rank if values["place"] is None else values["place"]
    values["prefix"] = f"[rank{rank}]:" if values["prefix"] is None else values["prefix"]
    return values | {"rank": rank}


CAUGHT_OLD = "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL("
CAUGHT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
    "NumelIn={size}, NumelOut={out}, Timeout(ms)=600000) ran for 600010 milliseconds before "
    "timing out."
)


def torch_113(rank, **how):
    yield (
        f"[E ProcessGroupNCCL.cpp:821] {CAUGHT_OLD}OpType={{op}}, TensorShape=[{{size}}], "
        "Timeout(ms)=1800000) ran for 1804310 milliseconds before timing out."
    ).format(**work(rank, how))


def torch_20(rank, **how):
    yield (
        f"[E ProcessGroupNCCL.cpp:828] {CAUGHT_OLD}SeqNum={{seq}}, OpType={{op}}, "
        "TensorShape=[{size}], Timeout(ms)=1800000) ran for 1804310 milliseconds before timing out."
    ).format(**work(rank, how))


def torch_21(rank, **how):
    line = f"[E ProcessGroupNCCL.cpp:474] [Rank {{rank}}] {CAUGHT}"
    yield line.format(**work(rank, how))


def torch_23(rank, **how):
    head, values = "[rank{rank}]:[E ProcessGroupNCCL.cpp:563] ", work(rank, how)
    yield f"{head}[Rank {{rank}}] {CAUGHT}".format(**values)
    yield (
        f"{head}[PG 0 Rank {{rank}}] Timeout at NCCL work: {{seq}}, last enqueued NCCL work: "
        "{enqueued}, last completed NCCL work: {completed}."
    ).format(**values)


def torch_24(rank, **how):
    head, values = "[rank{rank}]:[E703 10:00:00.1 ProcessGroupNCCL.cpp:607] ", work(rank, how)
    yield f"{head}[Rank {{rank}}] {CAUGHT}".format(**values)
    yield (
        f"{head}[PG 0 (default_pg) Rank {{rank}}] Exception (either an error or timeout) detected "
        "by watchdog at work: {seq}, last enqueued NCCL work: {enqueued}, last completed NCCL "
        "work: {completed}."
    ).format(**values)


def torch_26(rank, **how):
    head, values = (
        "{prefix}[E1201 10:00:00.1 ProcessGroupNCCL.cpp:632] [{group} Rank {place}] ",
        work(rank, how),
    )
    yield f"{head}{CAUGHT}".format(**values)
    yield (
        f"{head} failure detected by watchdog at work sequence id: {{seq}} PG status: last "
        "enqueued work: {enqueued}, last completed work: {completed}"
    ).format(**values)


def dump_signal(rank, enqueued=40, completed=40, origin=" rank 1", group=None):
    group = group or "PG ID 0 PG GUID 0(default_pg)"
    return (
        f"[rank{rank}]:[E1201 10:00:01.0 ProcessGroupNCCL.cpp:1682] [{group} Rank {rank}] "
        f"Received a dump signal due to a collective timeout from {origin} and we will try our "
        "best to dump the debug info. "
        f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: "
        f"{completed}.This is most likely caused by incorrect usages of collectives."
    )


def each(writer, *ranks, **values):
    return [line for rank in ranks for line in writer(rank, **values)]


NUMBERED = (torch_20, torch_21, torch_23, torch_24, torch_26)
COUNTED = (torch_23, torch_24, torch_26)

case(
    "torch_113 another operation",
    [*each(torch_113, 0, 1, 2), *each(torch_113, 3, op="BROADCAST", size=1)],
    "COL002",
    "3",
    "broadcast",
    "all_reduce",
)
case("torch_113 all equal", each(torch_113, 0, 1, 2, 3), "HNG016", "", "all_reduce")
for writer in NUMBERED:
    case(
        f"{writer.__name__} another operation",
        [*each(writer, 0, 1, 2), *each(writer, 3, op="BROADCAST", size=1)],
        "COL002",
        "3",
        "#41",
        "broadcast on rank 3",
        certainty="proven",
    )
    case(
        f"{writer.__name__} another size",
        [*each(writer, 0, 2, 3), *each(writer, 1, size=65)],
        "COL003",
        "1",
        "#41",
        certainty="proven",
    )
    case(
        f"{writer.__name__} all equal",
        each(writer, 0, 1, 2, 3),
        "HNG016",
        "",
        "all_reduce #41",
        certainty="likely",
    )
    case(
        f"{writer.__name__} one that said nothing",
        each(writer, 0, 1, 3),
        "COL001",
        "2",
        "left no record",
        "all_reduce #41",
        certainty="likely",
    )
for writer in COUNTED:
    case(
        f"{writer.__name__} one behind",
        [*each(writer, 0, 1, 3), dump_signal(2)],
        "COL001",
        "2",
        "never called all_reduce #41",
        "#40",
        certainty="likely",
    )
    case(
        f"{writer.__name__} one whose counter has passed",
        [*each(writer, 0, 1, 3), dump_signal(2, enqueued=42)],
        "HNG016",
        "",
        "all_reduce #41",
    )
case(
    "reduce-scatter and gather at one number",
    [
        *each(torch_26, 0, 1, 2, op="_REDUCE_SCATTER_BASE", size=256, out=64),
        *each(torch_26, 3, op="_ALLGATHER_BASE", size=64, out=256),
    ],
    "COL002",
    "3",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
)
case(
    "lists of unequal tensors",
    [
        *each(torch_26, 0, 1, 2, op="ALLGATHER", size=64, out=256),
        *each(torch_26, 3, op="ALLGATHER", size=32, out=128),
    ],
    "COL003",
    "3",
)
case(
    "all-to-all of unequal sizes is none",
    [line for rank in range(4) for line in torch_26(rank, op="ALLTOALL_BASE", size=64 + rank)],
    "HNG016",
    "",
    "all_to_all_single #41",
)
case(
    "two differ from two",
    [*each(torch_26, 0, 1), *each(torch_26, 2, 3, op="BROADCAST")],
    "COL002",
    "0-3",
)


# Several groups.

DP = "PG ID 2 PG GUID 7(dp)"
TP = "PG ID 1 PG GUID 3(tp)"

case(
    "a group of every second rank, one behind",
    [
        *torch_26(1, seq=9, enqueued=9, completed=8, group=DP, place=0),
        *torch_26(3, seq=9, enqueued=9, completed=8, group=DP, place=1),
        dump_signal(5, 8, 8, group="PG ID 2 PG GUID 7(dp)").replace("(dp) Rank 5", "(dp) Rank 2"),
        *torch_26(7, seq=9, enqueued=9, completed=8, group=DP, place=3),
    ],
    "COL001",
    "5",
    "all_reduce #9 in group dp",
)
case(
    "two groups of one name are kept apart",
    [
        *torch_26(0, seq=5, enqueued=5, completed=4, group="PG ID 2 PG GUID 11(dp)", place=0),
        *torch_26(2, seq=5, enqueued=5, completed=4, group="PG ID 2 PG GUID 11(dp)", place=1),
        *torch_26(1, seq=6, op="BROADCAST", enqueued=6, completed=5, group=DP, place=0),
        *torch_26(3, seq=6, op="BROADCAST", enqueued=6, completed=5, group=DP, place=1),
    ],
    None,
)
case(
    "the one that keeps another group waiting",
    [
        *torch_26(0, seq=9, enqueued=9, completed=8, group=DP, place=0),
        dump_signal(1, 8, 8, group=DP),
        *torch_26(1, seq=70, op="_ALLGATHER_BASE", enqueued=70, completed=69, group=TP, place=0),
        dump_signal(3, 69, 69, group=TP).replace("(tp) Rank 3", "(tp) Rank 1"),
    ],
    "COL001",
    "3",
    "all_gather_into_tensor #70 in group tp",
)
case(
    "places of a group whose ranks nobody names",
    [
        *torch_26(0, group=DP, place=0, prefix=""),
        *torch_26(0, group=DP, place=1, prefix="", op="BROADCAST"),
        *torch_26(0, group=DP, place=2, prefix=""),
    ],
    "COL002",
    "1",
    "broadcast",
)
case(
    "messages between stages are not collectives",
    [
        *torch_26(0, op="SEND", seq=5, enqueued=5, completed=4, group="PG ID 3 PG GUID 9(pp)"),
        *torch_26(1, op="RECV", seq=7, enqueued=9, completed=6, group="PG ID 3 PG GUID 9(pp)"),
    ],
    None,
)
case(
    "a log for each rank",
    {
        f"rank_{rank}.log": [line.replace(f"[rank{rank}]:", "") for line in torch_26(rank, **how)]
        for rank, how in enumerate([{}, {}, {"op": "BROADCAST", "size": 1}, {}])
    },
    "COL002",
    "2",
    "broadcast",
)
case(
    "one log of four, and three that are quiet",
    {
        "rank_0.log": list(torch_26(0)),
        **{f"rank_{rank}.log": ["step 12 loss 0.31"] for rank in (1, 2, 3)},
    },
    None,
)


# What surrounds the first message.

STACK = (
    "[rank{rank}]:[E1201 10:00:00.2 ProcessGroupNCCL.cpp:733] Stack trace of the failed "
    "collective: ",
    "#0 all_reduce from /opt/venv/lib/python3.11/site-packages/torch/distributed/"
    "distributed_c10d.py:2806",
    "#1 wrapper from /opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py:81",
    "#2 step from /home/me/train.py:{line}",
    "#3 <module> from /home/me/train.py:90",
)


def with_stack(rank, line, **values):
    yield from torch_26(rank, **values)
    for text in STACK:
        yield text.format(rank=rank, line=line)


case(
    "the lines of the calls",
    [
        *with_stack(0, 41),
        *with_stack(1, 41),
        *with_stack(2, 57, op="BROADCAST", size=1),
        *with_stack(3, 41),
    ],
    "COL002",
    "2",
    "/home/me/train.py:57",
    location="/home/me/train.py:57",
)
case(
    "what follows is told again in what()",
    [
        *each(torch_26, 0, 1, 3),
        dump_signal(2),
        "[rank0]:[E1201 10:00:02.0 ProcessGroupNCCL.cpp:685] [Rank 0] Some NCCL operations have "
        "failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
        "operations might run on corrupted/incomplete data.",
        "[rank0]:[E1201 10:00:02.0 ProcessGroupNCCL.cpp:699] [Rank 0] To avoid data "
        "inconsistency, we are taking the entire process down.",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread "
        "terminated with exception: [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran "
        "for 600010 milliseconds before timing out.",
        "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)",
    ],
    "COL001",
    "2",
    "all_reduce #41",
)
case(
    "cut off in the middle of a message",
    "\n".join([*each(torch_26, 0, 1, 3), dump_signal(2), *torch_26(0)])[:-120],
    "COL001",
    "2",
)
case(
    "cut off before the first message of a rank",
    "\n".join(each(torch_26, 0, 1, 2, 3))[40:],
    "HNG016",
    "",
)
case(
    "a timeout that was set to a minute",
    [
        line.replace("600000", "60000").replace("600010", "60012")
        for line in [*each(torch_26, 0, 1, 3), dump_signal(2)]
    ],
    "COL001",
    "2",
)
case(
    "a watchdog that got stuck itself",
    [
        *each(torch_26, 0, 1, 3),
        "[rank2]:[E1201 10:00:05.0 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank "
        "2] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
        "monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., "
        "CudaEventDestroy) hang blocking the watchdog",
    ],
    "COL001",
    "2",
)
case(
    "the first one to abort is a victim",
    [
        *each(torch_26, 0, 1, 2),
        dump_signal(3),
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2025-01-01_10:00:02",
        "  host      : node0",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -6 (pid: 12)  (SIGABRT)",
        "  error_file: <N/A>",
        "  traceback : Signal 6 (SIGABRT) received by PID 12",
    ],
    "COL001",
    "3",
    "all_reduce #41",
)


# Waiting in the call itself.

BLOCKING = (
    "[rank{rank}]: torch.distributed.DistBackendError: [Rank {rank}] Work WorkNCCL(SeqNum=12, "
    "OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) timed out in blocking wait."
)
CAUGHT_IN_CALL = (
    "[rank{rank}]: RuntimeError: [Rank {rank}] Caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType={op}, TensorShape=[8], Timeout(ms)=600000) ran for 600123 "
    "milliseconds before timing out."
)
for name, text in (("blocking wait", BLOCKING), ("blocking wait of old", CAUGHT_IN_CALL)):
    case(
        f"{name}, another operation",
        [
            *(text.format(rank=rank, op="ALLREDUCE") for rank in (0, 2, 3)),
            text.format(rank=1, op="BARRIER"),
        ],
        "COL002",
        "1",
        "barrier",
    )
    case(
        f"{name}, one that said nothing",
        [text.format(rank=rank, op="ALLREDUCE") for rank in (0, 1, 3)],
        "COL001",
        "2",
    )


# Reports of TORCH_NCCL_DESYNC_DEBUG.


def desync(rank, *lines, op="ALLREDUCE", seq=41):
    head = f"\t - [{rank}] Timeout at collective: {op}, #{seq}"
    return [*torch_20(rank, op=op, seq=seq), head, *lines]


case(
    "a desync report",
    desync(
        0,
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t     [2] finished collective #40, but didn't join collective #41 (count from 1)",
        "\t - Snapshot of ranks' latest states:",
        "\t   #40 finished ranks:",
        "\t     [2] finished ALLREDUCE",
        "\t   #41 started ranks:",
        "\t     [0, 1, 3] started ALLREDUCE",
    ),
    "COL001",
    "2",
    "all_reduce #41",
    "#40",
)
case(
    "a desync report of unlike calls",
    desync(
        1,
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t   - [0, 1, 2, 3] joined but didn't finish collective #41 (count from 1)",
        "\t - Snapshot of ranks' latest states:",
        "\t   #41 started ranks:",
        "\t     [3] started BROADCAST",
        "\t     [0, 1, 2] started ALLREDUCE",
    ),
    "COL002",
    "3",
    "broadcast",
)
case(
    "a desync report of a rank that never came",
    desync(
        0,
        "\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. "
        "They never joined any collectives",
        seq=1,
    )
    + each(torch_20, 1, 2, seq=1),
    "COL001",
    "3",
    "all_reduce #1",
)


# TORCH_DISTRIBUTED_DEBUG=DETAIL.


def fingerprint(op, shape, seq="41", dtype="Float"):
    number = f"SequenceNumber={seq}, " if seq else ""
    return (
        f"CollectiveFingerPrint({number}OpType={op}, TensorShape=[{shape}], "
        f"TensorDtypes={dtype}, TensorDeviceTypes=TensorOptions(dtype=float (default), "
        "device=cuda, layout=Strided (default), requires_grad=false (default), "
        "pinned_memory=false (default), memory_format=(nullopt)))"
    )


def mismatch(rank, mine, other, theirs):
    return (
        f"[rank{rank}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} "
        f"is running collective: {mine}, but Rank {other} is running collective: {theirs}."
        "Collectives differ in the following aspects: \t Op type: ALLREDUCEvs BROADCAST"
    )


ALLREDUCE, BROADCAST = fingerprint("ALLREDUCE", 64), fingerprint("BROADCAST", 1)
case(
    "fingerprints of unlike calls",
    [
        *(mismatch(rank, ALLREDUCE, 3, BROADCAST) for rank in (0, 1, 2)),
        mismatch(3, BROADCAST, 0, ALLREDUCE),
    ],
    "COL002",
    "3",
    "#41",
)
case(
    "fingerprints of unlike shapes, told by one",
    [
        mismatch(0, ALLREDUCE, 2, fingerprint("ALLREDUCE", 65)),
        mismatch(1, ALLREDUCE, 2, fingerprint("ALLREDUCE", 65)),
    ],
    "COL003",
    "2",
)
case(
    "fingerprints of unlike types",
    [
        mismatch(0, ALLREDUCE, 1, fingerprint("ALLREDUCE", 64, dtype="Half")),
        mismatch(2, ALLREDUCE, 1, fingerprint("ALLREDUCE", 64, dtype="Half")),
    ],
    "COL004",
    "1",
)
case(
    "fingerprints without numbers",
    [
        mismatch(r, fingerprint("ALLREDUCE", 64, ""), 3, fingerprint("BROADCAST", 1, ""))
        for r in (0, 1, 2)
    ],
    "COL002",
    "3",
)
case(
    "fingerprints of unlike numbers",
    [
        mismatch(r, fingerprint("ALLREDUCE", 64), 3, fingerprint("ALLREDUCE", 64, "40"))
        for r in (0, 1, 2)
    ],
    "COL001",
    "3",
    "#41",
)
case(
    "a monitored barrier",
    [
        "[rank0]: RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 300000 ms",
        "[rank2]: RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors "
        "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
    ],
    "COL001",
    "1,3",
    "monitored_barrier",
)


# The process group of Ascend's collectives.


def hccl(rank, op="ALLREDUCE", size=64, seq=41):
    yield (
        f"[ERROR] 2025-01-01-10:00:00 (PID:{100 + rank}, Device:{rank}, RankID:{rank}) ERR02200 "
        f"DIST call hccl api failed. [rank{rank}]:[E ProcessGroupHCCL.cpp:475] [Rank {rank}] "
        f"Watchdog caught collective operation timeout: WorkHCCL(SeqNum={seq}, OpType={op}, "
        f"NumelIn={size}, NumelOut={size}, Timeout(ms)=1800000) ran for 1800250 milliseconds "
        "before timing out."
    )


case(
    "HCCL another operation",
    [*each(hccl, 0, 1, 3), *each(hccl, 2, op="BROADCAST")],
    "COL002",
    "2",
    "broadcast",
)
case("HCCL one that said nothing", each(hccl, 0, 2, 3), "COL001", "1")


# Stacks.


def py_spy(pid, *frames, title="python train.py", thread="MainThread"):
    return "\n".join(
        [
            f"Process {pid}: {title}",
            "Python v3.11.2 (/usr/bin/python3.11)",
            "",
            f'Thread {pid} (idle): "{thread}"',
            *(f"    {frame}" for frame in frames),
            "",
        ]
    )


IN_ALL_REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:2806)",
    "wrapper (torch/distributed/c10d_logger.py:81)",
    "main (train.py:62)",
    "<module> (train.py:90)",
)
IN_SHARD = ("load_shard (train.py:31)", "main (train.py:62)", "<module> (train.py:90)")
IN_WORKER = (
    "_worker_loop (torch/utils/data/_utils/worker.py:349)",
    "run (multiprocessing/process.py:108)",
    "<module> (train.py:90)",
)
IN_LAUNCHER = (
    "_invoke_run (torch/distributed/elastic/agent/server/api.py:900)",
    "run (torch/distributed/elastic/agent/server/api.py:711)",
    "<module> (torchrun:8)",
)
FSDP = (
    "_engine_run_backward (torch/autograd/graph.py:824)",
    "backward (torch/_tensor.py:581)",
    "main (train.py:70)",
    "<module> (train.py:90)",
)
NATIVE_WAIT = (
    "__futex_abstimed_wait_common64 (libc.so.6)",
    "c10d::ProcessGroupNCCL::WorkNCCL::synchronizeInternal (libtorch_cuda.so)",
    "c10d::ProcessGroupNCCL::allreduce (libtorch_cuda.so)",
    "step (train.py:62)",
    "<module> (train.py:90)",
)


def stacks(name, files, culprits, *words, certainty="likely", location="train.py:31"):
    case(name, files, "HNG017", culprits, *words, certainty=certainty, location=location)


stacks(
    "py-spy of four ranks",
    {f"rank{r}.txt": py_spy(100 + r, *(IN_SHARD if r == 1 else IN_ALL_REDUCE)) for r in range(4)},
    "1",
    "rank 1 is at train.py:31",
    "wait in all_reduce at train.py:62",
)
stacks(
    "py-spy of a server",
    "".join(
        py_spy(100 + r, *(IN_SHARD if r == 2 else IN_ALL_REDUCE), title=f"sglang::scheduler_TP{r}")
        for r in range(4)
    )
    + py_spy(99, "poll (zmq/sugar/poll.py:80)", "<module> (serve.py:7)", title="sglang::router"),
    "2",
    "TP2 is at train.py:31",
)
stacks(
    "py-spy of a launcher, ranks and workers",
    py_spy(90, *IN_LAUNCHER, title="python torchrun train.py")
    + "".join(py_spy(100 + r, *(IN_SHARD if r == 0 else IN_ALL_REDUCE)) for r in range(3))
    + py_spy(200, *IN_WORKER),
    "0",
    "pid 100 is at train.py:31",
)
stacks(
    "py-spy with native frames",
    {f"rank{r}.txt": py_spy(100 + r, *(IN_SHARD if r == 3 else NATIVE_WAIT)) for r in range(4)},
    "3",
    "wait in all_reduce",
)
stacks(
    "collectives in threads of autograd",
    {
        f"rank{r}.txt": py_spy(100 + r, *IN_SHARD)
        if r == 2
        else py_spy(100 + r, *FSDP)
        + "\n".join(
            [
                'Thread 0x7F01 (idle): "pt_autograd_0"',
                "    _allgather_base (torch/distributed/distributed_c10d.py:4400)",
                "    all_gather_into_tensor (torch/distributed/distributed_c10d.py:4100)",
                "    unshard (torch/distributed/fsdp/_flat_param.py:1300)",
            ]
        )
        for r in range(4)
    },
    "2",
    "wait in all_gather_into_tensor",
)
stacks(
    "JSON of py-spy",
    {
        f"rank{r}.json": json.dumps(
            [
                {
                    "pid": 100 + r,
                    "thread_id": 1,
                    "thread_name": "MainThread",
                    "os_thread_id": 100 + r,
                    "active": False,
                    "owns_gil": False,
                    "frames": [
                        {"name": name, "filename": file, "short_filename": file, "line": line}
                        for name, file, line in (
                            [("load_shard", "train.py", 31), ("main", "train.py", 62)]
                            if r == 3
                            else [
                                ("barrier", "torch/distributed/distributed_c10d.py", 4159),
                                ("main", "train.py", 66),
                            ]
                        )
                    ],
                }
            ]
        )
        for r in range(4)
    },
    "3",
    "wait in barrier at train.py:66",
)


def faulthandler(*frames):
    return "\n".join(
        [
            "Thread 0x00007f01 (most recent call first):",
            '  File "/usr/lib/python3.11/threading.py", line 327 in wait',
            '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap',
            "",
            "Current thread 0x00007f00 (most recent call first):",
            *(f'  File "{file}", line {line} in {name}' for file, line, name in frames),
            "",
        ]
    )


C10D = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
stacks(
    "faulthandler of four ranks",
    {
        f"rank{r}.err": faulthandler(
            *([("train.py", 31, "load_shard")] if r == 1 else [(C10D, 2806, "all_reduce")]),
            ("train.py", 62, "main"),
            ("train.py", 90, "<module>"),
        )
        for r in range(4)
    },
    "1",
)
stacks(
    "faulthandler of processes without ranks",
    {
        f"{name}.stacks": faulthandler(
            *([("train.py", 31, "load_shard")] if name == "cat" else [(C10D, 2806, "all_reduce")]),
            ("train.py", 62, "main"),
            ("train.py", 90, "<module>"),
        )
        for name in ("ant", "bee", "cat", "dog")
    },
    "2",
    "cat.stacks is at train.py:31",
)
GDB_WAIT = """\
Thread 2 (Thread 0x7f02 (LWP {lwp}2) "pt_nccl_watchdg"):
#0  __futex_abstimed_wait_common64 (private=0) at ./nptl/futex-internal.c:57
#1  0x00007f10 in c10d::ProcessGroupNCCL::runLoop () from /opt/torch/lib/libtorch_cuda.so

Thread 1 (Thread 0x7f01 (LWP {lwp}) "python"):
#0  __futex_abstimed_wait_common64 (private=0) at ./nptl/futex-internal.c:57
#1  0x00007f10 in c10d::ProcessGroupGloo::AsyncWork::wait (this=0x1) from /opt/libtorch_cpu.so
#2  0x00007f11 in c10d::ops::(anonymous namespace)::allreduce_CPU () from /opt/libtorch_cpu.so
#3  0x00005500 in _PyEval_EvalFrameDefault ()
"""
GDB_READ = """\
Thread 1 (Thread 0x7f01 (LWP {lwp}) "python"):
#0  0x00007f12 in __GI___libc_read (fd=7) at ../sysdeps/unix/sysv/linux/read.c:26
#1  0x00005500 in _PyEval_EvalFrameDefault ()
"""
stacks(
    "gdb of four ranks",
    {f"rank{r}.gdb": (GDB_READ if r == 0 else GDB_WAIT).format(lwp=100 + r) for r in range(4)},
    "0",
    "wait in all_reduce",
    location="",
)
LLDB_WAIT = """\
(lldb) process attach --pid {pid}
Process {pid} stopped
(lldb) bt all
* thread #1, name = 'python', stop reason = signal SIGSTOP
  * frame #0: 0x00007f10 libc.so.6`__futex_abstimed_wait_common + 200
    frame #1: 0x00007f11 libtorch_cpu.so`gloo::transport::tcp::UnboundBuffer::waitRecv(int*) + 120
    frame #2: 0x00007f12 libtorch_cpu.so`gloo::allreduce(gloo::AllreduceOptions const&) + 900
    frame #3: 0x00007f13 libtorch_cpu.so`c10d::ProcessGroupGloo::allreduce(this=0x1) at P.cpp:9:3
  thread #2, name = 'pt_autograd_0'
    frame #0: 0x00007f10 libc.so.6`__futex_abstimed_wait_common + 200
"""
LLDB_READ = """\
(lldb) process attach --pid {pid}
Process {pid} stopped
(lldb) bt all
* thread #1, name = 'python', stop reason = signal SIGSTOP
  * frame #0: 0x00007f10 libc.so.6`read + 20
    frame #1: 0x00005500 python3.11`_PyEval_EvalFrameDefault + 900
"""
stacks(
    "lldb of processes without ranks",
    {f"{100 + n}.txt": (LLDB_READ if n == 1 else LLDB_WAIT).format(pid=100 + n) for n in range(3)},
    "1",
    "pid 101",
    "wait in all_reduce",
    location="",
)


# Nothing is wrong.
case(
    "torch 2.4, a log that was cut off: the first line of two names no group, the second does",
    [
        *(
            f"[{80 + rank}] [rank{rank}]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] "
            f"[Rank {rank}] {CAUGHT.format(**work(rank, {'seq': 1580}))}"
            for rank in (0, 1, 2)
        ),
        *(
            f"[{90 + rank}] [rank{rank}]:[E321 02:07:08.5 ProcessGroupNCCL.cpp:1664] "
            f"[PG 1 Rank {rank}] Exception (either an error or timeout) detected by watchdog at "
            "work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579."
            for rank in (0, 3)
        ),
    ],
    "HNG016",
    "",
    "all_reduce #1580 in group 1",
)
case(
    "the only one that wrote is a victim of the timeout, not a crash",
    [
        *each(torch_20, 1, op="BROADCAST", seq=3),
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        *summary(1, -6),
    ],
    "HNG002",
    "",
    "rank 1 waited in vain in broadcast #3 in group default_pg and aborted",
)
case(
    "a fingerprint in a log that names no rank",
    [
        "Traceback (most recent call last):",
        '  File "/data/train.py", line 22, in main',
        "    dist.reduce(x, 0)",
        "RuntimeError: Detected mismatch between collectives on ranks. "
        + ", but ".join(
            f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=12, "
            f"OpType={op}, TensorShape=[20, 10], TensorDtypes=Float, TensorDeviceTypes="
            "TensorOptions(dtype=float (default), device=cpu, layout=Strided (default)))"
            for rank, op in ((1, "REDUCE"), (0, "ALLREDUCE"))
        )
        + ".",
    ],
    "COL002",
    "0-1",
    "all_reduce on rank 0 but reduce on rank 1",
)
case(
    "numbers of several groups that no message names",
    [*each(torch_20, 0, seq=96117), *each(torch_20, 0, seq=96120), *each(torch_20, 7, seq=64088)],
    None,
)
case(
    "an exception that is a general known fault is told once",
    [
        f"(EngineCore pid=1879) ERROR 03-29 12:59:53 [core.py:1099] {line}"
        for line in (
            "Traceback (most recent call last):",
            '  File "/data/engine.py", line 73, in run',
            "    engine = make()",
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)",
        )
    ],
    "HNG001",
    "0",
    "nccl-system-error",
)

case(
    "shapes of an all_gather that the debug wrapper compared",
    "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running "
    "collective: CollectiveFingerPrint(SequenceNumber=7, OpType=_ALLGATHER_BASE, TensorShape=[3, "
    "16], TensorDtypes=BFloat16), but Rank 2 is running collective: CollectiveFingerPrint("
    "SequenceNumber=7, OpType=_ALLGATHER_BASE, TensorShape=[4, 16], TensorDtypes=BFloat16)."
    "Collectives differ in the following aspects: \t Tensor Tensor shapes: 3 16vs 4 16\n",
    "COL003",
    "1-2",
    "48 on rank 1, 64 on rank 2",
)
case(
    "fingerprints whose fields are not separated",
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=41, OpType=BROADCAST, TensorShape=[1], "
    "TensorDtypes=Long), but Rank 1 is running collective: CollectiveFingerPrint("
    "SequenceNumber=40OpType=BROADCAST).\n",
    "COL001",
    "1",
    "never called broadcast #41",
)
case(
    "another call on one of few ranks that were read",
    [
        *each(torch_26, 3, 9, seq=78, enqueued=79, completed=77),
        *torch_26(7, op="BROADCAST", size=56, seq=78, enqueued=78, completed=77),
    ],
    "COL002",
    "3,7,9",
    "all_reduce on ranks 3,9 but broadcast on rank 7",
    certainty="likely",
)
case(
    "lines that a terminal broke at a width",
    [
        part
        for rank in (0, 1, 3)
        for line in torch_26(rank)
        for part in (line[:137], line[137:])
        if part
    ]
    + [dump_signal(2)],
    "COL001",
    "2",
    "never called all_reduce #41",
)
case(
    "a monitored barrier, with the exception of the rank that asked",
    [
        "[E ProcessGroupGloo.cpp:138] [Rank 0]: Rank 2 failed to pass monitoredBarrier in 9000 ms",
        "Traceback (most recent call last):",
        '  File "/data/train.py", line 20, in <module>',
        "    dist.monitored_barrier()",
        "RuntimeError: Rank 2 failed to pass monitoredBarrier in 9000 ms",
    ],
    "COL001",
    "2",
    "never called monitored_barrier",
)
case(
    "some wait for their GPUs, one in a collective",
    {
        "stacks.txt": "\n".join(
            f"Process {pid}: python train.py\nPython v3.11.5 (/opt/bin/python3.11)\n\n"
            f'Thread {pid} (active): "MainThread"\n    {call}\n    train_step (train.py:{line})\n'
            "    <module> (train.py:50)"
            for pid, call, line in (
                (101, "synchronize (torch/cuda/streams.py:224)", 20),
                (102, "synchronize (torch/cuda/streams.py:224)", 20),
                (103, "all_to_all_single (torch/distributed/distributed_c10d.py:3600)", 30),
            )
        )
        + "\n"
    },
    None,
)
case(
    "stacks that a watchdog of a server printed, with its own line",
    {
        "server.log": "\n".join(
            f"[2025-01-01 08:28:03 TP{n}] Pyspy dump for PID {231 + n}:\n"
            f"Process {231 + n}: sglang::scheduler_TP{n}\nPython v3.10.12 (/usr/bin/python3.10)\n"
            f'\nThread {231 + n} (active): "MainThread"\n    {call}\n    run (scheduler.py:15)\n'
            "    <module> (<string>:1)"
            for n, call in (
                (0, "draft (worker.py:397)"),
                (1, "all_reduce (torch/distributed/distributed_c10d.py:2700)"),
                (2, "all_reduce (torch/distributed/distributed_c10d.py:2700)"),
            )
        )
        + "\n[2025-01-01 08:28:03 TP1] Watchdog timeout (self.watchdog_timeout=300)\n"
    },
    "HNG017",
    "0",
    "worker.py:397",
)

case(
    "a batch of messages whose sizes nobody knows",
    torch_26(
        1,
        op="COALESCED",
        size=18446744073709551615,
        seq=1,
        enqueued=1,
        completed=0,
        group="PG ID 6 PG GUID 90(PIPELINE_MODEL_PARALLEL_GROUP)",
    ),
    None,
)


QUIET = {
    "NCCL's own log": [
        "node0:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "node0:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        "node0:1:9 [0] NCCL INFO comm 0x55 rank 0 nranks 4 cudaDev 0 busId 1000 - Init COMPLETE",
        "step 1 loss 2.31",
    ],
    "a group that was not used": [
        "[rank0]:[W1201 10:00:00.0 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 0]  using "
        "GPU 0 to perform barrier as devices used by this process are currently unknown. This can "
        "potentially cause a hang if this rank to GPU mapping is incorrect.",
        "step 1 loss 2.31",
    ],
    "a group that was not destroyed": [
        "[rank0]:[W1201 10:00:00.0 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
        "destroy_process_group() was not called before program exit, which can leak resources.",
    ],
    "a watchdog that begins and ends": [
        "[I1201 10:00:00.0 ProcessGroupNCCL.cpp:852] [PG ID 0 PG GUID 0 Rank 0] "
        "ProcessGroupNCCL initialization options: size: 4, global rank: 0, TIMEOUT(ms): 600000",
        "[I1201 10:00:00.0 ProcessGroupNCCL.cpp:1650] [PG ID 0 PG GUID 0 Rank 0] Heartbeat monitor "
        "starts.",
        "[I1201 10:09:00.0 ProcessGroupNCCL.cpp:1800] [PG ID 0 PG GUID 0 Rank 0] NCCL watchdog "
        "thread terminated normally",
    ],
    "a slow first call": [
        "[rank0]:[W1201 10:00:00.0 socket.cpp:755] [c10d] The client socket cannot be initialized "
        "to connect to [node0]:29500 (errno: 97 - Address family not supported by protocol).",
        "first step took 183.2 s (compilation and NCCL setup)",
        "step 1 loss 2.31",
    ],
    "words of a program": [
        "watchdog: no timeout within 600 s",
        "[0, 1] started ALLREDUCE benchmark",
        "Timed out waiting for the license server, going on without it",
        "[3] finished warmup",
    ],
    "settings in a log": [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_BLOCKING_WAIT=0 timeout=0:10:00",
        "dist.monitored_barrier passed in 0.3 s",
        "NCCL_DEBUG=WARN",
    ],
    "failed operations without a cause": [
        "[rank0]:[E1201 10:00:02.0 ProcessGroupNCCL.cpp:685] [Rank 0] Some NCCL operations have "
        "failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
        "operations might run on corrupted/incomplete data.",
    ],
    "counters of a job that moves": [
        "[rank0]:[I1201 10:00:02.0 ProcessGroupNCCL.cpp:1700] [PG ID 0 PG GUID 0(default_pg) Rank "
        "0] Observed flight recorder dump signal from another rank via TCPStore.",
        "step 100 loss 1.2",
    ],
}
