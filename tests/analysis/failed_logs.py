"""Small logs of jobs that failed, in the formats of their launchers, each with its truth.

The formats are those of the launchers' sources and documentation; the values are made up. All have
one fault, `read(7)` at /data/train.py:9 that raises ValueError, or a process that was ended.
"""

from typing import NamedTuple

HEAD = "Traceback (most recent call last):"
FAULT = (
    HEAD,
    '  File "/data/train.py", line 9, in <module>',
    "    read(7)",
    "ValueError: shard 7 has 0 rows",
)
LIBRARY = "/opt/venv/lib/python3.11/site-packages"
PEER_GONE = (
    HEAD,
    '  File "/data/train.py", line 12, in <module>',
    "    dist.all_reduce(x)",
    f'  File "{LIBRARY}/torch/distributed/distributed_c10d.py", line 3252, in all_reduce',
    "    work.wait()",
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
)


class Truth(NamedTuple):
    """What is to be said: by which check, of whom (a rank, or part of a name), in which words."""

    code: str
    who: int | str
    words: tuple[str, ...]
    severity: str = "error"


RAISED_2 = Truth("HNG001", 2, ("ValueError: shard 7 has 0 rows", "/data/train.py:9"))


def raised_by(who):
    return RAISED_2._replace(who=who)


def died(who, *words, severity="error"):
    return Truth("HNG002", who, words, severity)


def lines(*parts):
    return "\n".join(parts) + "\n"


def with_prefix(prefix, block=FAULT):
    return [prefix + line for line in block]


def summary(rank, exitcode, *, name="", others=(), first="(first observed failure)"):
    """The summary of torchrun since torch 1.11."""

    def entry(number, rank, exitcode, name):
        return (
            f"[{number}]:",
            "  time      : 2025-01-01_10:00:02",
            "  host      : node0",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {exitcode} (pid: {100 + rank})" + (f"  ({name})" if name else ""),
            "  error_file: <N/A>",
            "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors",
        )

    rest = [line for n, other in enumerate(others, 1) for line in entry(n, *other)]
    return (
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        *(rest or ["  <NO_OTHER_FAILURES>"]),
        "-" * 60,
        f"Root Cause {first}:",
        *entry(0, rank, exitcode, name),
        "=" * 60,
    )


LAUNCHERS_OWN = (
    HEAD,
    '  File "/opt/venv/bin/torchrun", line 8, in <module>',
    "    sys.exit(main())",
    f'  File "{LIBRARY}/torch/distributed/launcher/api.py", line 383, in launch_agent',
    "    raise ChildFailedError(",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
)
AGENT = "E0101 10:00:01.043000 4700 torch/distributed/elastic/multiprocessing/api.py:1002]"
CLOSING = (
    "W0101 10:00:01.000000 4700 torch/distributed/elastic/multiprocessing/api.py:1028] "
    "Sending process 4710 closing signal SIGTERM"
)
STOPPED = "[2025-01-01 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess {}"
RETURNED = (
    "[2025-01-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['/opt/python', '-u', "
    "'train.py', '--local_rank={rank}', '--deepspeed'] exits with return code = {code}"
)
BAR = "  50%|█████     | 3/6 [00:01<00:01,  2.10it/s]"
RICH_WIDTH = 78


def boxed(*rows):
    """A traceback as rich draws it."""
    title = " Traceback (most recent call last) "
    return (
        f"╭{title:─^{RICH_WIDTH}}╮",
        *(f"│ {row:<{RICH_WIDTH - 2}} │" for row in rows),
        f"╰{'─' * RICH_WIDTH}╯",
        FAULT[-1],
    )


def json_lines(key="log", block=FAULT, **more):
    import json

    return lines(*(json.dumps({key: line + "\n" * (key == "log"), **more}) for line in block))


LOGURU = (
    "2025-01-01 10:00:00.000 | ERROR    | __main__:<module>:9 - An error has been caught in "
    "function '<module>', process 'MainProcess' (31), thread 'MainThread' (140):",
    HEAD,
    "",
    '> File "/data/train.py", line 9, in <module>',
    "    read(7)",
    "    └ <function read at 0x7f0000000000>",
    "",
    FAULT[-1],
)
SPAWN_HEAD = (
    HEAD,
    '  File "/data/launch.py", line 30, in <module>',
    "    mp.spawn(main, nprocs=4)",
    "torch.multiprocessing.spawn.ProcessRaisedException: ",
    "",
    "-- Process 2 terminated with the following error:",
)
RAY_TASK = (
    HEAD,
    '  File "/data/driver.py", line 20, in <module>',
    "    ray.get(workers)",
    f'  File "{LIBRARY}/ray/_private/worker.py", line 2782, in get',
    "    raise value.as_instanceof_cause()",
    "ray.exceptions.RayTaskError(ValueError): ray::TrainWorker.fit() (pid=31, ip=10.0.0.4, "
    "actor_id=ab12, repr=<train.TrainWorker object at 0x7f00>)",
    *FAULT[1:],
)
ACTOR_DIED = (
    HEAD,
    '  File "/data/driver.py", line 20, in <module>',
    "    ray.get(workers)",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "\tclass_name: TrainWorker",
    "\tactor_id: 8d1498767d305748d59d87da01000000",
    "\tpid: 3190",
    "\tnamespace: 1109301e",
    "\tip: 10.0.0.4",
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
)
MPI_SIGNAL = (
    "-" * 74,
    "Primary job  terminated normally, but 1 process returned",
    "a non-zero exit code. Per user-direction, the job has been aborted.",
    "-" * 74,
    "mpirun noticed that process rank 2 with PID 4711 on node node1 exited on",
    "signal 9 (Killed).",
    "-" * 74,
)
NCCL_GONE = (
    HEAD,
    '  File "/data/train.py", line 12, in <module>',
    "    loss.backward()",
    f'  File "{LIBRARY}/torch/autograd/graph.py", line 825, in _engine_run_backward',
    "    return Variable._execution_engine.run_backward(",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or "
    "there was a network error, NCCL version 2.21.5",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer node1<40222>",
)

FAILED = {
    # torchrun
    "torchrun summary": (
        lines(*with_prefix("[rank2]: "), CLOSING, *LAUNCHERS_OWN, *summary(2, 1)),
        RAISED_2,
    ),
    "torchrun summary with the traceback of @record": (
        lines(
            *LAUNCHERS_OWN,
            *summary(2, 1)[:-2],
            "  traceback : " + HEAD,
            *("  " + line for line in FAULT[1:]),
            "  ",
            "=" * 60,
        ),
        RAISED_2,
    ),
    "torchrun tee": (
        lines(*with_prefix("[default2]:[rank2]: "), *with_prefix("[default0]:", PEER_GONE)),
        RAISED_2,
    ),
    "torchrun tee before torch had a hook": (lines(*with_prefix("[default2]:")), RAISED_2),
    "torchrun of torch 1.9": (
        lines(
            *FAULT,
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) "
            "local_rank: 2 (pid: 31) of binary: /opt/venv/bin/python",
            "*" * 46,
            "               train.py FAILED",
            "=" * 46,
            "Root Cause:",
            "[0]:",
            "  time: 2021-07-23_19:34:51",
            "  rank: 2 (local_rank: 2)",
            "  exitcode: 1 (pid: 31)",
            "  error_file: <N/A>",
            '  msg: "Process failed with exitcode 1"',
            "=" * 46,
            "Other Failures:",
            "  <NO_OTHER_FAILURES>",
            "*" * 46,
        ),
        RAISED_2,
    ),
    "torchrun cut before its summary": (
        lines(f"{AGENT} failed (exitcode: -9) local_rank: 2 (pid: 31) of binary: /opt/python"),
        died(2, "SIGKILL"),
    ),
    "torchrun, a rank without a message crashed": (
        lines(CLOSING, *summary(2, -11, name="SIGSEGV", others=[(0, -15, "SIGTERM")])),
        died(2, "SIGSEGV"),
    ),
    "torchrun, a rank met a full /dev/shm": (
        lines(*summary(2, -7, name="SIGBUS")),
        died(2, "SIGBUS"),
    ),
    "torchrun, others fail for want of the first": (
        lines(
            *with_prefix("[rank0]: ", PEER_GONE),
            *with_prefix("[rank2]: "),
            *summary(2, 1, others=[(0, 1, "")]),
        ),
        RAISED_2,
    ),
    "the first by times, whatever the order in the file": (
        lines(
            *with_prefix("2025-01-01T10:00:05.000Z [rank0]: ", PEER_GONE[:-1]),
            "2025-01-01T10:00:05.000Z [rank0]: KeyError: 'lost'",
            *with_prefix("2025-01-01T10:00:01.000Z [rank2]: "),
        ),
        RAISED_2,
    ),
    "the first by the order in the file": (
        lines(
            *with_prefix("[rank2]: "),
            *with_prefix("[rank0]: ", (*FAULT[:2], "    x", "KeyError: 'later'")),
        ),
        RAISED_2,
    ),
    "torchrun, nobody signed, the peers' words come last": (
        lines(
            "step 1 loss 2.0",
            *FAULT,
            "step 2 loss 1.9",
            *PEER_GONE,
            CLOSING,
            *LAUNCHERS_OWN,
            *summary(2, 1, others=[(0, 1, "")]),
        ),
        RAISED_2,
    ),
    "torchrun, nobody signed, and one was caught before": (
        lines(
            "step 1 loss 2.0",
            *FAULT[:-1],
            "OSError: cannot open the cache",
            "retrying without the cache",
            "step 2 loss 1.9",
            *FAULT,
            CLOSING,
            *LAUNCHERS_OWN,
            *summary(2, 1),
        ),
        RAISED_2,
    ),
    # accelerate and deepspeed
    "accelerate launch": (
        lines(
            *FAULT,
            HEAD,
            '  File "/opt/venv/bin/accelerate", line 8, in <module>',
            f'  File "{LIBRARY}/accelerate/commands/launch.py", line 763, in simple_launcher',
            "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
            "subprocess.CalledProcessError: Command '['/opt/python', 'train.py']' returned "
            "non-zero exit status 1.",
        ),
        raised_by("a process in"),
    ),
    "accelerate launch, killed": (
        lines(
            HEAD,
            f'  File "{LIBRARY}/accelerate/commands/launch.py", line 763, in simple_launcher',
            "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
            "subprocess.CalledProcessError: Command '['/opt/python', 'train.py']' died with "
            "<Signals.SIGKILL: 9>.",
        ),
        died("a process in", "SIGKILL"),
    ),
    "deepspeed, with a traceback": (
        lines(
            *with_prefix("[rank2]: "),
            "[2025-01-01 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess "
            "31",
            "[2025-01-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] ['/opt/python', "
            "'-u', 'train.py', '--local_rank=2', '--deepspeed'] exits with return code = 1",
        ),
        RAISED_2,
    ),
    "deepspeed, over several nodes": (
        lines(
            *with_prefix("node1: [rank2]: "),
            "node1: [2025-01-01 10:00:01,000] [ERROR] [launch.py:325:sigkill_handler] "
            "['/opt/python', '-u', 'train.py', '--local_rank=0'] exits with return code = 1",
        ),
        RAISED_2,
    ),
    # Slurm
    "srun, killed": (lines("srun: error: node1: task 2: Killed"), died(2, "SIGKILL")),
    "srun, crashed": (
        lines(
            "srun: error: node1: task 2: Segmentation fault (core dumped)",
            "srun: Terminating StepId=47.0",
            "slurmstepd: error: *** STEP 47.0 ON node0 CANCELLED AT 2025-01-01T10:00:03 ***",
            "srun: error: node0: tasks 0-1: Terminated",
        ),
        died(2, "SIGSEGV"),
    ),
    "srun, a failing status": (
        lines("srun: error: node1: task 2: Exited with exit code 13"),
        died(2, "status 13"),
    ),
    "srun, a status that tells of SIGKILL": (
        lines("srun: error: node1: task 2: Exited with exit code 137"),
        died(2, "SIGKILL"),
    ),
    "srun --label": (
        lines(*with_prefix("0: ", PEER_GONE), *with_prefix("2: "), "1: step 3", "3: step 3"),
        RAISED_2,
    ),
    "srun with a traceback beside it": (
        lines(*FAULT, "srun: error: node1: task 2: Exited with exit code 1"),
        RAISED_2,
    ),
    "slurm, time limit": (
        lines(
            "[rank0]: step 7",
            "slurmstepd: error: *** STEP 47.0 ON node0 CANCELLED AT 2025-01-01T10:00:03 DUE TO "
            "TIME LIMIT ***",
        ),
        died("job 47", "time limit", severity="info"),
    ),
    "slurm, time limit with a step that dies later": (
        lines(
            "slurmstepd: error: *** JOB 47 ON node0 CANCELLED AT 2025-01-01T10:00:03 DUE TO TIME "
            "LIMIT ***",
            "srun: error: node0: tasks 0-1: Terminated",
        ),
        died(0, "time limit", severity="info"),
    ),
    "slurm, preemption": (
        lines(
            "slurmstepd: error: *** JOB 47 ON node0 CANCELLED AT 2025-01-01T10:00:03 DUE TO "
            "PREEMPTION ***"
        ),
        died("job 47", "another job", severity="info"),
    ),
    "slurm, node failure": (
        lines(
            "srun: error: Node failure on node3",
            "slurmstepd: error: *** JOB 47 ON node0 CANCELLED AT 2025-01-01T10:00:03 DUE TO NODE "
            "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        ),
        died("node node3", "failed, and the job with it"),
    ),
    "slurm, memory of the step": (
        lines(
            "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=47.0. Some of your "
            "processes may have been killed by the cgroup out-of-memory handler.",
            "srun: error: node1: task 2: Killed",
        ),
        died(2, "SIGKILL", "want of memory"),
    ),
    # MPI
    "mpirun of Open MPI 4": (lines(*MPI_SIGNAL), died(2, "SIGKILL")),
    "mpirun of Open MPI 4, tagged": (lines(*with_prefix("[1,2]<stderr>:")), RAISED_2),
    "mpirun of Open MPI 4, a failing status": (
        lines(
            "mpirun detected that one or more processes exited with non-zero status, thus causing",
            "the job to be terminated. The first process to do so was:",
            "",
            "  Process name: [[45678,1],2]",
            "  Exit code:    3",
        ),
        died(2, "status 3"),
    ),
    "prterun of Open MPI 5": (
        lines(
            "prterun noticed that process rank 2 with PID 4711 on node node1 exited on",
            "signal 11 (Segmentation fault).",
        ),
        died(2, "SIGSEGV"),
    ),
    "prterun of Open MPI 5, a failing status": (
        lines(
            "prterun detected that one or more processes exited with non-zero status,",
            "thus causing the job to be terminated. The first process to do so was:",
            "",
            "   Process name: [prterun-node0-77@1,2]",
            "   Exit code:    3",
        ),
        died(2, "status 3"),
    ),
    "MPICH": (
        lines(
            "=" * 60,
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
            "=   RANK 2 PID 4711 RUNNING AT node1",
            "=   KILLED BY SIGNAL: 9 (Killed)",
            "=" * 60,
        ),
        died(2, "SIGKILL"),
    ),
    "mpiexec -l of MPICH": (lines(*with_prefix("[2] "), *with_prefix("[0] ", PEER_GONE)), RAISED_2),
    # Ray
    "Ray, a worker that names its rank": (
        lines(*with_prefix("(Trainer pid=12, ip=10.0.0.4, rank=2) ")),
        RAISED_2,
    ),
    "Ray, workers without ranks": (
        lines(
            "(TrainWorker pid=30, ip=10.0.0.1) step 3",
            *with_prefix("(TrainWorker pid=30, ip=10.0.0.1) ", PEER_GONE),
            *with_prefix("(TrainWorker pid=31, ip=10.0.0.2) "),
        ),
        raised_by("TrainWorker pid=31, ip=10.0.0.2"),
    ),
    "Ray, what the driver passes on": (
        lines(*RAY_TASK),
        raised_by("TrainWorker pid=31, ip=10.0.0.4"),
    ),
    "Ray, an actor died": (
        lines(*ACTOR_DIED),
        died("TrainWorker pid=3190", "died"),
    ),
    "Ray, memory of the node": (
        lines(
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
            "memory.",
            "Memory on the node (IP: 10.0.0.4, ID: ab12) where the task (actor ID: cd34, "
            "name=TrainWorker.__init__, pid=3190, memory used=60.10GB) was running was 119GB / "
            "125GB",
        ),
        died("TrainWorker pid=3190", "want of memory"),
    ),
    # containers
    "kubectl logs --prefix": (
        lines(*with_prefix("[pod/llm-worker-2/pytorch] "), "[pod/llm-worker-0/pytorch] step 3"),
        raised_by("pod/llm-worker-2/pytorch"),
    ),
    "kubectl logs --prefix of all pods": (
        lines(
            *with_prefix("[pod/llm-0/pytorch] ", PEER_GONE),
            *with_prefix("[pod/llm-2/pytorch] "),
            "[pod/llm-1/pytorch] step 3",
        ),
        RAISED_2,
    ),
    "a container's log in JSON": (
        json_lines(stream="stderr", time="2025-01-01T10:00:00.000Z"),
        raised_by("a process in"),
    ),
    "a collector's log in JSON": (
        json_lines("message", kubernetes={"pod_name": "llm-worker-2"}, level="error"),
        raised_by("llm-worker-2"),
    ),
    "a logger's JSON with a rank": (
        json_lines("msg", rank=2, time="2025-01-01 10:00:00"),
        RAISED_2,
    ),
    "containerd's log": (
        lines(*with_prefix("2025-01-01T10:00:00.000000000Z stderr F ")),
        raised_by("a process in"),
    ),
    "docker compose": (
        lines(
            *with_prefix("worker-2  | "),
            "worker-0  | step 3",
            "worker-1  | step 3",
            "worker-2 exited with code 1",
        ),
        RAISED_2,
    ),
    "docker compose, killed": (
        lines("worker-2 exited with code 137", "Aborting on container exit..."),
        died("worker-2", "SIGKILL"),
    ),
    "Kubernetes, memory": (
        lines("Warning  pod/llm-worker-2 container pytorch terminated: OOMKilled (exit code 137)"),
        died("llm-worker-2", "want of memory"),
    ),
    # spawn and servers
    "spawn": (lines(*SPAWN_HEAD, *FAULT), RAISED_2),
    "spawn, a failing status": (
        lines(
            HEAD,
            '  File "/data/launch.py", line 30, in <module>',
            "    mp.spawn(main, nprocs=4)",
            "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with exit "
            "code 3",
        ),
        died(2, "status 3"),
    ),
    "vLLM": (
        lines(
            "(Worker_TP0 pid=29) INFO 07-23 19:34:50 [gpu_worker.py:200] Ready",
            *with_prefix(
                "(VllmWorker rank=2 pid=31) ERROR 07-23 19:34:51 [multiproc_executor.py:9] "
            ),
            "(VllmWorker rank=2 pid=31) INFO 07-23 19:34:52 [multiproc_executor.py:77] shutting "
            "down",
        ),
        RAISED_2,
    ),
    "SGLang": (
        lines(
            "[2025-07-23 19:34:50 TP0] Load weight begin. avail mem=78.50 GB",
            *with_prefix("[2025-07-23 19:34:51 TP2] "),
        ),
        raised_by("TP2"),
    ),
    "SGLang, two axes": (
        lines(*with_prefix("[2025-07-23 19:34:51 DP1 TP0] ")),
        raised_by("DP1 TP0"),
    ),
    "SGLang, a message of many lines": (
        lines(f"[2025-07-23 19:34:51 TP2] Scheduler hit an exception: {HEAD}", *FAULT[1:]),
        raised_by("TP2"),
    ),
    # loggers and terminals
    "rich": (
        lines(*boxed("/data/train.py:9 in <module>", "", "❱ 9 read(7)")),
        raised_by("a process"),
    ),
    "rich with prefixes": (
        lines(*with_prefix("[rank2]: ", boxed("/data/train.py:9 in <module>", "", "❱ 9 read(7)"))),
        RAISED_2,
    ),
    "loguru": (lines(*LOGURU), raised_by("a process in")),
    "a message of several lines": (
        lines(
            "step 1 loss 2.0",
            *FAULT[:-1],
            "RuntimeError: CUDA error: device-side assert triggered",
            "CUDA kernel errors might be asynchronously reported at some other API call.",
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        ),
        Truth("HNG001", "a process in", ("device-side assert", "/data/train.py:9")),
    ),
    "words of a tracker at exit": (
        lines(
            "step 1 loss 2.0",
            *FAULT,
            "wandb: Waiting for W&B process to finish... (failed 1).",
            "wandb: Run summary:",
            "wandb:  loss 2.0",
        ),
        raised_by("a process in"),
    ),
    "a bar of progress before the head": (
        lines(f"{BAR}\r{BAR}[rank2]: {FAULT[0]}", *with_prefix("[rank2]: ", FAULT[1:])),
        RAISED_2,
    ),
    "a bar of progress before the head without a prefix": (
        lines(f"{BAR}{FAULT[0]}", *FAULT[1:]),
        raised_by("a process in"),
    ),
    "colours": (
        lines(*(f"\x1b[31m[Rank 2]\x1b[0m {line}" for line in FAULT)),
        RAISED_2,
    ),
    "broken at 40 columns": (
        lines(
            f"[rank2]: {HEAD}",
            '[rank2]:   File "/data/some/folder/with/',
            'a/long/name/train.py", line 9, in <modul',
            "e>",
            "[rank2]:     read(7)",
            f"[rank2]: {FAULT[-1]}",
        ),
        Truth("HNG001", 2, ("ValueError: shard 7", "with/a/long/name/train.py:9")),
    ),
    "numbered lines": (
        lines("   1  step 1", *(f"{n:4}  {line}" for n, line in enumerate(FAULT, 2))),
        raised_by("a process in"),
    ),
    "rank=2 in a logger's prefix": (
        lines(*with_prefix("2025-01-01 10:00:00,000 ERROR rank=2 local_rank=0 train.py:40 | ")),
        RAISED_2,
    ),
    "only the peers were heard": (
        lines(*with_prefix("[rank0]: ", PEER_GONE), *with_prefix("[rank1]: ", PEER_GONE)),
        Truth("HNG001", "", ("lost a peer", "Connection reset by peer"), "warning"),
    ),
    "only NCCL's words about a peer": (
        lines(*with_prefix("[rank0]: ", NCCL_GONE)),
        Truth("HNG001", "", ("lost a peer", "Connection closed by remote peer"), "warning"),
    ),
    "peers and the one that was killed": (
        lines(*with_prefix("[rank0]: ", NCCL_GONE), *summary(2, -9, name="SIGKILL")),
        died(2, "SIGKILL"),
    ),
    # Messages of launchers that name nobody, or the wrong one
    "deepspeed names the last process that it started": (
        lines(*(STOPPED.format(pid) for pid in (31, 32)), RETURNED.format(rank=1, code=-7)),
        died("one of local ranks 0-1", "SIGBUS"),
    ),
    "deepspeed, only one process": (
        lines(STOPPED.format(31), RETURNED.format(rank=0, code=-9)),
        died(0, "SIGKILL"),
    ),
    "deepspeed, aborted by the watchdog": (
        lines(
            "[E ProcessGroupNCCL.cpp:563] [PG 1 Rank 3] Process group watchdog thread terminated "
            "with exception: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL("
            "SeqNum=19, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for "
            "600010 milliseconds before timing out.",
            *(STOPPED.format(pid) for pid in (31, 32)),
            RETURNED.format(rank=1, code=-6),
        ),
        died("", "aborted at the timeout", severity="warning"),
    ),
    "torchrun was told to end": (
        lines(
            "W0101 10:00:00.000000 31 torch/distributed/elastic/agent/server/api.py:719] "
            "Received 15 death signal, shutting down workers",
            CLOSING,
        ),
        died("a process in", "ended from outside by SIGTERM", severity="info"),
    ),
    "the terminal was closed": (
        lines(
            HEAD,
            '  File "/opt/venv/bin/torchrun", line 8, in <module>',
            f'  File "{LIBRARY}/torch/distributed/elastic/multiprocessing/api.py", line 84, in '
            "_terminate_process_handler",
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 31 got signal: "
            "1",
        ),
        died("a process in", "SIGHUP", severity="info"),
    ),
    "a shell saw it killed": (
        lines("step 1 loss 2.0", "Killed"),
        died("a process in", "SIGKILL"),
    ),
    "a batch script saw it killed": (
        lines(
            "/var/spool/slurmd/job47/slurm_script: line 28:  8156 Killed                  python "
            "train.py --epochs 4",
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=47.batch cgroup. Some of "
            "your processes may have been killed by the cgroup out-of-memory handler.",
        ),
        died("pid=8156", "want of memory"),
    ),
    "a summary without indentation": (
        lines(*(line.strip() for line in summary(2, -9, others=[(3, 1, "")]))),
        died(2, "SIGKILL"),
    ),
    "a summary on one line": (
        lines(" ".join(line.strip() for line in summary(2, 1, others=[(3, -15, "SIGTERM")]))),
        died(2, "status 1"),
    ),
    "one actor under two names": (
        lines(
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this "
            "task.",
            "\tclass_name: make_class.<locals>.Worker",
            "\tactor_id: d9cc",
            "\tpid: 2017",
            "\tname: abcWorker_0:1",
            "\tip: 10.0.0.6",
            "The actor is dead because its worker process has died.",
            "(raylet) A worker died or was killed while executing a task by an unexpected system "
            "error. RayTask ID: ffff Worker ID: 1cb1 Node ID: 6e7f Worker IP address: 10.0.0.6 "
            "Worker port: 10258 Worker PID: 2017 Worker exit type: SYSTEM_ERROR",
        ),
        died("Worker pid=2017, ip=10.0.0.6", "died"),
    ),
    # Who waited for others is a victim.
    "fewer came to the store than were expected": (
        lines(
            *with_prefix(
                "(RefActor pid=31) ",
                (
                    HEAD,
                    f'  File "{LIBRARY}/torch/distributed/rendezvous.py", line 189, in '
                    "_create_c10d_store",
                    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for "
                    "clients. 1/3 clients joined.",
                ),
            )
        ),
        Truth("HNG001", "", ("RefActor pid=31", "store-clients-missing")),
    ),
    "a rendezvous to which too few nodes came": (
        lines(
            HEAD,
            '  File "/opt/venv/bin/torchrun", line 8, in <module>',
            f'  File "{LIBRARY}/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", line '
            "1025, in next_rendezvous",
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        ),
        Truth("HNG001", "", ("rendezvous-timeout",), "warning"),
    ),
    "HCCL waited for another rank": (
        lines(
            *with_prefix(
                "[rank1]: ",
                (
                    HEAD,
                    '  File "/data/train.py", line 12, in <module>',
                    "    torch.npu.synchronize()",
                    f'  File "{LIBRARY}/torch_npu/npu/utils.py", line 60, in synchronize',
                    "RuntimeError: npuSynchronizeDevice: NPU function error: "
                    "AclrtSynchronizeDeviceWithTimeout, error code is 507048",
                    "[ERROR] 2025-01-01-10:45:23 (PID:13, Device:1, RankID:1) ERR00100 PTA call "
                    "acl api failed",
                    "EI0002: [PID: 13] 2025-01-01-10:45:23.586.187 The wait execution of the "
                    "Notify register times out. Reason: The Notify register has not received the "
                    "Notify record from remote rank: [unknown].",
                ),
            )
        ),
        Truth("HNG001", "", ("lost a peer", "/data/train.py:12"), "warning"),
    ),
    "the debug wrapper names one call only": (
        lines(
            *with_prefix(
                "[rank0]: ",
                (
                    HEAD,
                    '  File "/data/train.py", line 12, in <module>',
                    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is "
                    "running inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, "
                    "TensorShape=[34], TensorDtypes=Float, TensorDeviceTypes=TensorOptions())",
                ),
            )
        ),
        Truth("HNG001", "", ("collective-mismatch", "BROADCAST"), "warning"),
    ),
    # Tracebacks of which the head is cut off
    "the log begins within a traceback": (lines(*with_prefix("[rank2]: ", FAULT[1:])), RAISED_2),
    "the log begins within a traceback of a peer": (
        lines(*PEER_GONE[3:]),
        Truth("HNG001", "", ("lost a peer",), "warning"),
    ),
    "a message that is told twice": (
        lines(
            *NCCL_GONE[-4:],
            *NCCL_GONE,
        ),
        Truth("HNG001", "", ("lost a peer", "Connection closed by remote peer"), "warning"),
    ),
    # Lines of known faults
    "a port of a network card": (
        lines(
            "2025-01-01T10:00:00.000Z: [1,2]<stdout>:n7:8:9 [0] transport/net_ib.cc:93 NCCL WARN "
            "NET/IB : Got async event : port error",
            "2025-01-01T10:00:00.100Z: [1,2]<stdout>:n7:8:9 [0] misc/ibvwrap.cc:220 NCCL WARN Call "
            "to ibv_get_async_event failed",
        ),
        Truth("HNG019", 2, ("ib-port-error",)),
    ),
    "a process that the line names by its host": (
        lines("n7:8:9 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"),
        Truth("HNG019", "", ("process 8 on n7 (GPU 3)", "nccl-out-of-memory")),
    ),
    "NCCL found calls that do not fit": (
        lines(
            "n7:8:9 [3] init.cc:1247 NCCL WARN Mismatched collective detected, please check your "
            "collective calls at and around rank 39."
        ),
        Truth("HNG019", "", ("around rank 39", "nccl-mismatch")),
    ),
    "a GPU that is gone, over several lines": (
        lines(
            "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "               NVRM: fallen off the bus and is not responding to commands.",
        ),
        Truth("HNG019", "", ("gpu-lost",)),
    ),
    "an error of CUDA that the watchdog met": (
        lines(
            "(Worker pid=53) [E ProcessGroupNCCL.cpp:916] [Rank 2] NCCL watchdog thread terminated "
            "with exception: CUDA error: unknown error",
            "(Worker pid=53) CUDA kernel errors might be asynchronously reported at some other API "
            "call.",
        ),
        Truth("HNG019", 2, ("watchdog-cuda-error",)),
    ),
    "a server that kills itself": (
        lines(
            "[2025-01-01 10:00:00 TP1] Watchdog timeout (self.watchdog_timeout=300)",
            "[2025-01-01 10:00:05] Received sigquit from a child process. It usually means the "
            "child failed.",
            "Killed",
        ),
        Truth("HNG019", "", ("sglang-watchdog",), "info"),
    ),
    "the launcher's own exception": (
        lines(
            *summary(1, 1),
            HEAD,
            f'  File "{LIBRARY}/accelerate/test_utils/testing.py", line 383, in '
            "execute_subprocess_async",
            "    raise RuntimeError(",
            "RuntimeError: 'accelerate-launch test_script.py' failed with returncode 1",
        ),
        died(1, "status 1"),
    ),
    "a general error of NCCL after a timeout": (
        lines(
            "  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType="
            "ALLREDUCE, Timeout(ms)=1800000) r",
            "an for 1804582 milliseconds before timing out.",
            HEAD,
            '  File "/data/train.py", line 26, in train',
            "    loss.backward()",
            f'  File "{LIBRARY}/torch/autograd/__init__.py", line 149, in backward',
            "RuntimeError: NCCL error in: NCCLUtils.hpp:158, unhandled system error, NCCL version "
            "21.0.3",
        ),
        Truth("HNG001", "", ("unhandled system error", "/data/train.py:26"), "warning"),
    ),
}
