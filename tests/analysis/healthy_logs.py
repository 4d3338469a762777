"""Logs of jobs that went well, with what looks like failures to a search for words."""

from tests.analysis.failed_logs import BAR, FAULT, HEAD, LIBRARY, PEER_GONE, lines

RETRY = (
    HEAD,
    f'  File "{LIBRARY}/urllib3/connectionpool.py", line 790, in urlopen',
    "    response = self._make_request(conn)",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
STEPS = [f"step {n} loss {2.5 - n / 100:.3f}" for n in range(1, 6)]


def logged(text, level="INFO", second=0):
    return f"2025-01-01 10:00:{second:02d},000 {level} train: {text}"


HEALTHY = {
    "bars of progress": "".join(
        f"\r{n * 10:3}%|{'█' * n}| {n}/10 [00:0{n}<00:01]" for n in range(10)
    )
    + "\nTraining done, 0 errors\n",
    "warnings of torch": lines(
        f"{LIBRARY}/torch/utils/data/dataloader.py:665: UserWarning: 'pin_memory' argument is set",
        "  warnings.warn(warn_msg)",
        "[rank0]:[W101 10:00:00.000000 ProcessGroupNCCL.cpp:4718] [PG ID 0 PG GUID 0 Rank 0]  "
        "using GPU 0 as device used by this process is currently unknown. This can potentially "
        "cause a hang if this rank to GPU mapping is incorrect.",
        *STEPS,
    ),
    "an exception that was caught and tried again": lines(
        logged("step 1 loss 2.5"),
        logged("download failed (attempt 1 of 3), retrying in 5 s", "WARNING", 1),
        *RETRY,
        logged("step 2 loss 2.4", second=7),
    ),
    "the same on a rank among others": lines(
        *(f"[rank{n}]: step 1 loss 2.5" for n in range(4)),
        *(f"[rank2]: {line}" for line in RETRY),
        "[rank2]: retrying",
        *(f"[rank{n}]: step 2 loss 2.4" for n in range(4)),
    ),
    "a traceback that a logger wrote, then steps": lines(
        *STEPS[:2],
        "ERROR:metrics:cannot reach the tracker",
        *FAULT,
        *STEPS[2:],
    ),
    "prefixes of a container around a caught exception": lines(
        *(
            f"2025-01-01T10:00:00.00{n}Z stderr F {line}"
            for n, line in enumerate([*STEPS[:2], *RETRY, "falling back to the cache", *STEPS[2:]])
        )
    ),
    "lines of JSON": lines(
        *(f'{{"level": "info", "message": "step {n}", "error": null}}' for n in range(20))
    ),
    "exit codes that are 0": lines(
        *STEPS,
        "worker-0 exited with code 0",
        "[INFO] [launch.py:351:main] Process 31 exits successfully.",
        "  exitcode  : 0 (pid: 31)",
        "process 1 terminated with exit code 0",
    ),
    "words of errors in harmless lines": lines(
        "Error rate: 0.031, word error 0.12",
        "killed 0 stale processes; oom_kill 0",
        "0 tasks: none failed. no Traceback was written",
        "test accuracy for class Killed: 0.91",
        "resuming: node failure handling is on, time limit 24:00:00",
        *STEPS,
    ),
    "an exception that Python ignored at the end": lines(
        *STEPS,
        "Exception ignored in: <function Pool.__del__ at 0x7f0000000000>",
        HEAD,
        f'  File "{LIBRARY}/multiprocess/pool.py", line 268, in __del__',
        "ResourceWarning: unclosed running multiprocessing pool",
    ),
    "NCCL's own lines": lines(
        "node0:31:31 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "node0:31:77 [0] NCCL INFO comm 0x5600 rank 0 nranks 8 cudaDev 0 - Init COMPLETE",
        *STEPS,
    ),
    "steps of Slurm that end well": lines(
        "srun: job 47 queued and waiting for resources",
        "srun: job 47 has been allocated resources",
        *(f"{n}: {step}" for n in range(2) for step in STEPS),
        "srun: Step created for StepId=47.1",
    ),
    "a list of what an evaluation raised": lines(
        *STEPS,
        "case 7 raised as expected:",
        *PEER_GONE,
        "case 8 passed",
        "case 9 passed",
        "case 10 passed",
        f"{BAR}",
    ),
    "text that quotes a launcher": lines(
        "If you see 'Root Cause (first observed failure)', read the guide.",
        "docs: the agent logs 'Sending process 4710 closing signal SIGTERM' when it stops",
        *STEPS,
    ),
}
