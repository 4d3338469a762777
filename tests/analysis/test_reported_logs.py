"""What ``analyze`` says of excerpts as people paste them into reports, whose truth is known.

The files in ``postmortem/reported`` are called after the report that shows such a log: its lines
are those of the libraries, shortened, with made-up names and numbers. Those in
``postmortem/healthy`` are of jobs that went well, and mention errors in passing.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from distdiag.analysis import analyze
from distdiag.events.errors import UsageError
from distdiag.findings.finding import Severity

INPUTS = Path(__file__).parent / "postmortem"


class Truth(NamedTuple):
    """The one alarm, or the note where a log tells neither cause nor culprit; "": nobody is named.

    `who` are ranks, or the name of a process.
    """

    code: str
    severity: str
    who: str
    words: tuple[str, ...] = ()


def raised(who, *words, severity="error"):
    return Truth("HNG001", severity, who, words)


def died(who, *words, severity="error"):
    return Truth("HNG002", severity, who, words)


def met(*words, who="", severity="error"):
    return Truth("HNG019", severity, who, words)


def follows(*words):
    return met(*words, "which follows from something else", severity="info")


STUCK_TP = "TP3 is at penaltylib/min_new_tokens.py:78, while TP0, TP1, TP2 wait in broadcast"
REPORTED = {
    "accelerate-1192": raised("0", "uncorrectable ECC", "The memory of this GPU is faulty"),
    "accelerate-1481": raised("", "Rank 0 has 237 params, while rank 1 has inconsistent 0 params"),
    "agent-r1-33": died("WorkerDict pid=320144, ip=10.0.0.4"),
    "arjuna-52": died("pid=8156", "SIGKILL for want of memory"),
    "art-201": died("1", "rank 1 died"),
    "ascend-43": died("one of local ranks 0-7", "SIGABRT"),
    "ascend-48": follows("An NPU did not end its tasks"),
    "awsome-192": raised(
        "", "rank 10 raised", "127.0.0.1<45069>", "could not connect", severity="warning"
    ),
    "axolotl-1268": died("7", "SIGKILL"),
    "axolotl-1670": Truth(
        "HNG016", "info", "", ("rank 1 waits in all_gather #2263", "rank 0 left")
    ),
    "ccl-54": met("oneCCL failed", "error while creating worker thread"),
    "ccl-tagged": raised("0-1", "could not open device directory", "/data/train.py:31"),
    "chatglm-1232": raised("", "store-timeout); it waited for rank 0", severity="warning"),
    "chinese-llama-274": raised("", "never reached, the node that holds the rendezvous"),
    "club-58": raised("EngineCore pid=104", "CUDA out of memory", "before APIServer pid=1"),
    "dcp-exception": raised("3", "OSError: [Errno 28] No space left", "before ranks 0-2 failed"),
    "deim-105": follows("ranks 0-2 wrote", "watchdog of a process group"),
    "determined-8915": died("", "since the job was cancelled", severity="info"),
    "easyr1-324": died("node 10.0.160.9", "failed, and the job with it"),
    "funasr-2006": Truth("HNG016", "info", "", ("rank 14 waits in all_reduce #15734",)),
    "gpud-1209": met("fallen off the bus", "lost the GPU"),
    "gpustack-2125": raised("", "rank 1 raised", "could not all connect to each other"),
    "hafs-101": died("289", "SIGBUS"),
    "hkproj-1": raised(
        "", "10.0.0.14<52822> failed : No route to host", "could not connect", severity="warning"
    ),
    "horovod-1122": Truth("HNG019", "error", "3", ("Cuda failure 'invalid argument'",)),
    "horovod-2365": raised("25", "std::logic_error", "an illegal memory access", "cuda-illegal"),
    "ignite-3466": raised("1", "ncclCommInitRank failed: unhandled cuda error"),
    "jukebox-155": died("pid=9665", "SIGKILL"),
    "k8s-125": raised("a process in", "host not found", "cannot be resolved here"),
    "k8s-2008": died("kubeflow.pytorch-simple-worker-0", "exited with status 1"),
    "lightning-151": raised("0", "AttributeError: Can't get attribute 'Net'"),
    "lightning-9388": raised("1", "ValueError: bad sample", "/data/train.py:31", "before rank 0"),
    "llamafactory-3839": raised("3", "HCCL could not start its process on this NPU"),
    "llamafactory-6953": died("", "local rank 0 waited in vain", severity="warning"),
    "llamafactory-7396": Truth("HNG016", "error", "", ("ranks 0-5 wait in all_reduce #1580",)),
    "llamafactory-8261": follows("ranks 1,6 wrote", "did not end within the timeout"),
    "llm-foundry-258": died("2", "SIGBUS"),
    "megatron-516": died("pid=5279, pid=5283", "SIGBUS"),
    "milabench-269": Truth("HNG016", "info", "", ("rank 3 waits in all_gather_into_tensor #2070",)),
    "mm-eureka-8": raised(
        "2", "FileNotFoundError", "after OSError: [Errno 39] Directory not empty"
    ),
    "must-7": follows("Some NCCL operations have failed or timed out"),
    "nccl-1409": Truth(
        "COL002", "error", "7", ("all_reduce on ranks 0-6 but broadcast on rank 7",)
    ),
    "nccl-1529": raised("1", "nvmlDeviceGetHandleByPciBusId() failed", "cannot see"),
    "nccl-1814": met("process 984 on node0 (GPU 4)", "retry exceeded"),
    "nccl-241": died("8", "exited with status 3"),
    "nccl-849": Truth("COL001", "error", "4-7", ("ranks 4-7 never called monitored_barrier",)),
    "nccl-928": met("denied access to local memory"),
    "nccl-975": met("process 12251 on node1 (GPU 5)", "could not connect to a peer"),
    "nemo-12203": raised("3", "Stale file handle", "/data/pretrain.py:40"),
    "nvidia-modules-1150": met("caused by previous Xid 149", "A link between GPUs, or its switch"),
    "opendde-23": Truth("COL003", "error", "1-2", ("8242640 on rank 1, 8248384 on rank 2",)),
    "openrlhf-1126": follows("ranks 0-7 wrote", "from  rank 34"),
    "pytorch-107021": met("never reached, the node that holds the rendezvous"),
    "pytorch-113128": raised("12", "uncorrectable ECC", "The memory of this GPU is faulty"),
    "pytorch-118369": follows("ranks 0,3,7 wrote"),
    "pytorch-135486": died("0", "rank 0 died by SIGSEGV"),
    "pytorch-140969": Truth(
        "COL001", "error", "3-7", ("never called all_reduce #31117", "called at /data/model.py:650")
    ),
    "pytorch-149984": met("A system call failed inside NCCL"),
    "pytorch-61839": died("a process in", "SIGSEGV"),
    "pytorch-64926": met("never reached, the node that holds the rendezvous"),
    "pytorch-72034": raised("a process in", "DataLoader worker (pid 29001) is killed"),
    "pytorch-77030": Truth("COL002", "error", "0", ("ranks 1-7 but reduce on rank 0",)),
    "pytorch-85604": raised("1", "0.0.0.0:47531", "The port of MASTER_PORT is taken"),
    "rayfed-41": died("pid=1377, ip=10.0.0.146"),
    "recbole-2069": raised("", "rank 5 waited in vain for rank 0", severity="warning"),
    "returnn-1484": follows("A message of gloo did not come"),
    "rocm-fault": died("1", "SIGABRT"),
    "sglang-12076": Truth("HNG017", "warning", "TP3", (STUCK_TP,)),
    "sglang-17941": Truth("HNG017", "info", "", ("PP1_TP0, PP2_TP0 wait", "PP0_TP0 waits")),
    "sglang-3745": died("", "SIGSEGV in all_reduce at", "parallel_state.py:414"),
    "sglang-3752": follows("made no progress for the time of its watchdog"),
    "sglang-5602": raised("", "TP3 waited in vain for rank 0", severity="warning"),
    "sglang-7783": follows("made no progress for the time of its watchdog"),
    "simpletuner-1880": raised("0", "AssertionError"),
    "slurm-node": died("node gpu07", "failed, and the job with it"),
    "streaming-868": raised("0", "FileNotFoundError", "before rank 8"),
    "torchforge-568": raised("0", "unexpected pos 704 vs 598", "could not write all of a file"),
    "torchtune-2676": met("never reached, the node that holds the rendezvous"),
    "tusas-149": died("1-3", "SIGKILL for want of memory"),
    "unsloth-10": died("3", "exited with status 1"),
    "verl-472": died("WorkerDict pid=27497, ip=10.0.0.1"),
    "verl-4921": died("WorkerDict pid=87687, ip=10.0.0.5"),
    "vllm-11737": raised("1", "an illegal memory access", "before rank 0 failed"),
    "vllm-15182": raised("3", "CUDA out of memory"),
    "vllm-15295": died("", "was ended from outside by SIGTERM", severity="info"),
    "vllm-15687": died("RayWorkerWrapper pid=336", "SIGSEGV in __init__ (pynccl.py:99)"),
    "vllm-17939": raised("1", "an illegal memory access was encountered"),
    "vllm-ascend-1443": raised("", "train pid=8464 lost a peer", severity="warning"),
    "vlm-r1-257": follows("watchdog got stuck for 480 seconds"),
    "xla-2387": raised("", "rank 5 lost a peer", "Failed to meet rendezvous", severity="warning"),
    "yolox-788": raised("SpawnProcess-1 pid=9795", "valid cuDNN algorithm", "trainer.py:103"),
}


@pytest.mark.parametrize(("name", "truth"), REPORTED.items(), ids=list(REPORTED))
def test_a_reported_log_is_judged_rightly(name, truth):
    report = analyze([INPUTS / "reported" / f"{name}.log"])
    alarms = [f for f in report.findings if f.severity is not Severity.INFO]
    found = alarms or list(report.findings)
    assert [(f.code, str(f.severity)) for f in found] == [(truth.code, truth.severity)], found
    (finding,) = found
    for word in truth.words:
        assert word in finding.message
    labels = {info.rank: info.label for info in report.run.ranks}
    if truth.who[:1].isdigit():
        assert str(finding.ranks) == truth.who
        assert not any(labels.get(rank) for rank in finding.ranks)
    elif truth.who:
        assert truth.who in finding.message
        assert all(labels[rank] for rank in finding.ranks)
        assert finding.ranks
    elif finding.code != "HNG002":
        assert not finding.ranks


def test_a_note_tells_why_a_process_died_of_which_only_the_end_was_seen():
    notes = {
        name: " ".join(
            f.message
            for f in analyze([INPUTS / "reported" / f"{name}.log"]).findings
            if f.code == "HNG019"
        )
        for name in ("verl-472", "rocm-fault")
    }
    assert "No further thread or process could be started" in notes["verl-472"]
    assert "used memory that is not mapped there" in notes["rocm-fault"]


def test_a_crash_that_faulthandler_saw_asks_for_no_faulthandler():
    (finding,) = analyze([INPUTS / "reported" / "sglang-3745.log"]).findings
    assert "faulthandler" not in finding.fix


def test_the_last_attempt_counts_where_torchrun_started_the_ranks_again(tmp_path):
    log = (INPUTS / "healthy" / "elastic-restart.log").read_text()
    path = tmp_path / "train.log"
    path.write_text(f"{log}{(INPUTS / 'reported' / 'lightning-9388.log').read_text()}")
    (finding,) = analyze([path]).findings
    assert (finding.code, str(finding.ranks)) == ("HNG001", "1")
    assert "ValueError: bad sample" in finding.message


HEALTHY = sorted(path.stem for path in (INPUTS / "healthy").iterdir())


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_that_mentions_errors_gives_no_alarm(name):
    try:
        report = analyze([INPUTS / "healthy" / f"{name}.log"])
    except UsageError as error:
        assert str(error).startswith("nothing that can be checked was found")
        return
    assert [f.message for f in report.findings if f.severity is not Severity.INFO] == []
