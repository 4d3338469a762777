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
    "a long build of kernels": lines(
        "Using /root/.cache/torch_extensions/py311_cu124 as PyTorch extensions root...",
        "Detected CUDA files, patching ldflags",
        "Emitting ninja build file /root/.cache/torch_extensions/py311_cu124/fused/build.ninja...",
        "[1/3] /usr/local/cuda/bin/nvcc -DTORCH_EXTENSION_NAME=fused -c fused.cu -o fused.cuda.o",
        'fused.cu(41): warning #177-D: variable "lane" was declared but never referenced',
        "[3/3] c++ fused.o fused.cuda.o -shared -o fused.so",
        "Loading extension module fused...",
        "Time to load fused op: 184.31 seconds",
        *STEPS,
    ),
    "inductor tries kernels that do not fit": lines(
        "AUTOTUNE mm(4096x4096, 4096x4096)",
        "  triton_mm_11 0.4126 ms 100.0% ACC_TYPE='tl.float32', BLOCK_K=32, num_warps=8",
        "  triton_mm_17 inf ms 0.0% out of resource: shared memory, Required: "
        "262144, limit: 232448",
        "SingleProcess AUTOTUNE benchmarking takes 3.9 seconds and 21.4 seconds precompiling",
        *STEPS,
    ),
    "steps that a loss scaler leaves out": lines(
        "[deepspeed] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 "
        "Skipping step. Attempted loss scale: 65536, reducing to 32768",
        *STEPS,
    ),
    "a tracker that cannot be reached for a while": lines(
        STEPS[0],
        "wandb: Network error (ConnectionError), entering retry loop.",
        STEPS[1],
        "wandb: WARNING A graphql request initiated by the public API timed out (timeout=19 sec).",
        *STEPS[2:],
    ),
    "a trainer's summary": lines(
        "***** Running training *****",
        "  Num examples = 1,000",
        "{'loss': 2.31, 'grad_norm': 1.7, 'learning_rate': 4.9e-05, 'epoch': 0.1}",
        "{'train_runtime': 31.0, 'train_samples_per_second': 32.2, "
        "'train_loss': 2.2, 'epoch': 1.0}",
        "Training completed. Do not forget to share your model on huggingface.co/models =)",
    ),
    "a server that refuses requests": lines(
        "INFO 07-23 19:34:51 [api_server.py:1820] Starting vLLM API server on http://0.0.0.0:8000",
        'INFO:     10.0.0.7:51422 - "GET /v2/models HTTP/1.1" 404 Not Found',
        "ERROR 07-23 19:35:02 [serving_chat.py:197] Error in preprocessing prompt inputs",
        'INFO:     10.0.0.7:51424 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
        "INFO 07-23 19:35:10 [loggers.py:116] Engine 000: Running: 2 reqs, Waiting: 0 reqs",
    ),
    "a rendezvous that takes its time": lines(
        "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node0]:29500 "
        "(errno: 111 - Connection refused).",
        "[I socket.cpp:522] [c10d] retrying",
        "[rank0]: rendezvous done, world size 16",
        *(f"[rank{n}]: {step}" for n in range(2) for step in STEPS),
    ),
    "memory that is given back": lines(
        STEPS[0],
        "UserWarning: 1 pytorch allocator cache flushes since last step. this happens when there "
        "is high memory pressure and is detrimental to performance.",
        *STEPS[1:],
    ),
}
