"""Why processes end in the ways that they do, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Story(NamedTuple):
    """Why a process ended in this way, and what to do about it."""

    why: str
    fix: str


LEFT: Final = Story(
    "This rank left with a failing exit status, and the launcher then stopped the other ranks, "
    "wherever they were.",
    "Look at the condition under which the program leaves at this line on this rank. If the "
    "program may stop early there, let all ranks decide together (`dist.all_reduce(flag, "
    "op=dist.ReduceOp.MAX)`) and leave with status 0.",
)
ALL_LEFT: Final = Story(
    "All ranks left in the same way: the program itself decided to fail.",
    "Look at the condition of this exit, and at what the ranks wrote before it.",
)
ABORTED_WAITING: Final = Story(
    "A watchdog aborted this process because a collective did not end within its timeout: this "
    "rank is a victim. Another rank did not come to the call, or did not complete it, or the "
    "network failed; the files that were read do not show which.",
    "Read the output of the other ranks, first of those whose files are missing here. Next time, "
    "keep the output of each rank (`torchrun --log-dir DIR --redirects 3`) and set "
    "`TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`.",
)
OUTSIDE: Final = Story(
    "All ranks got this signal, which a launcher, a scheduler or a person sends. A fault of the "
    "program never sends it.",
    "Find out who stopped the job: a time limit, a pre-emption, `scancel`, a signal to the "
    "launcher, or the failure of another node. The program need not change.",
)
ASKED_TO_END: Final = Story(
    "Somebody ended this rank with a signal that a fault of the program never sends, and the other "
    "ranks cannot continue without it.",
    "Find out who sent the signal: a script, a limit for single processes, or the launcher of "
    "another node.",
)
OUT_OF_MEMORY: Final = Story(
    "The memory of the host, or of the job's cgroup, was used up. The kernel's out-of-memory "
    "killer ended processes here by SIGKILL while this job ran.",
    "Use less host memory on this node (fewer data loader workers, fewer pinned buffers, "
    "checkpoints that are not loaded by all ranks at once), or ask for more. The kernel log "
    "(`dmesg`) names the process and its size.",
)
SHORT_OF_MEMORY: Final = Story(
    "This process used up the memory that it was allowed. The kernel, the scheduler or the "
    "container ended it by SIGKILL.",
    "Use less host memory on this node (fewer data loader workers, fewer pinned buffers, "
    "checkpoints that are not loaded by all ranks at once), or ask for more (`--mem` in Slurm, the "
    "memory limit of the container).",
)
TIME_LIMIT: Final = Story(
    "The scheduler ended the job at its time limit; the program is not at fault.",
    "Ask for more time (`--time`). Or save a checkpoint before the limit (`sbatch "
    "--signal=B:USR1@300` sends a signal first) and resume from it.",
)
PREEMPTED: Final = Story(
    "The scheduler ended the job to make room for another job; the program is not at fault.",
    "Let the job be queued again (`sbatch --requeue`), save checkpoints often, and resume from the "
    "last one.",
)
NODE_FAILED: Final = Story(
    "A node of the job failed, and the scheduler ended all processes of the job.",
    "Leave the node out (`--exclude=NODE`) and resume from the last checkpoint. Tell the "
    "administrators of the cluster which node failed.",
)
CANCELLED: Final = Story(
    "Somebody cancelled the job, or its launcher did after a failure that the files read do not "
    "show. SIGHUP comes when the terminal or ssh session that started the job is closed.",
    "Find out who cancelled the job. If nobody did, look for the first error in the output of the "
    "ranks. Start long jobs through a scheduler, or within `tmux` or `screen`.",
)
OF_CAUSES: Final[Mapping[str, Story]] = {
    "out-of-memory": SHORT_OF_MEMORY,
    "time-limit": TIME_LIMIT,
    "preempted": PREEMPTED,
    "node-failed": NODE_FAILED,
    "cancelled": CANCELLED,
}
FAILED: Final = Story(
    "The process left with a failing exit status, and its launcher stopped the other ranks. Python "
    "exits with status 1 after an exception; the traceback is in the output of this rank.",
    "Read the last lines that this rank wrote to stderr. With torchrun, `--log-dir DIR --redirects "
    "3` keeps them for each rank, and `@record` (torch.distributed.elastic.multiprocessing.errors) "
    "on `main()` puts the traceback into the summary of torchrun.",
)
KILLED_UNSEEN: Final = Story(
    "SIGKILL comes from outside of the process, and the process cannot write anything before it "
    "ends. The most frequent sender is the kernel's out-of-memory killer; a scheduler, a container "
    "or a person can send it too.",
    "On the node of this rank look for `Out of memory: Killed process` in `dmesg` or `journalctl "
    "-k`, for `oom_kill` in the output of slurmstepd, and for `OOMKilled` in `kubectl describe "
    "pod`. Then look for a limit or a pre-emption in the log of the scheduler.",
)
BUS_ERROR: Final = Story(
    "SIGBUS comes when a page of a memory-mapped file is not available. As a rule /dev/shm is full "
    "or too small: data loader workers and NCCL share memory there.",
    "Make /dev/shm larger (`docker run --shm-size=16g` or `--ipc=host`; in Kubernetes an "
    "`emptyDir` with `medium: Memory`), or use fewer workers. `df -h /dev/shm` in the container "
    "shows its size.",
)
SEGMENTATION: Final = Story(
    "The process crashed in native code, below Python: it used memory that does not belong to it. "
    "Such a crash prints no Python traceback.",
    "Run it again with `python -X faulthandler` to see the Python line, or look at the core file. "
    "Suspect compiled extensions first, then versions of CUDA, NCCL and torch that do not match.",
)
KILLED: Final = Story(
    "SIGKILL comes from outside of the process, and the process cannot write anything before it "
    "ends. The kernel counted no out-of-memory kill here.",
    "Look in the scheduler's log for a limit or a pre-emption, and find out who may have killed "
    "the process.",
)
CRASHED: Final = Story(
    "The process crashed in native code, below Python: such a crash prints no Python traceback.",
    "Read the last lines that this rank wrote (an assertion of C++ or CUDA). Run it again with "
    "`python -X faulthandler` to see the Python line, or look at the core file.",
)
CRASHED_SEEN: Final = Story(
    "The process crashed in native code, below this line of Python: it used memory that does not "
    "belong to it, or it aborted after an error.",
    "Check what this line passes to native code, and look at the core file. Suspect compiled "
    "extensions first, then versions of CUDA, NCCL and torch that do not match.",
)
SHARED_MEMORY: Final = Story(
    "/dev/shm is full or too small. NCCL and data loader workers share memory there, and a "
    "container has only 64 MiB of it by default.",
    "Make /dev/shm larger (`docker run --shm-size=16g` or `--ipc=host`; in Kubernetes an "
    "`emptyDir` with `medium: Memory`), and remove files that dead runs left there. `df -h "
    "/dev/shm` in the container shows its size.",
)
