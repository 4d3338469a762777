"""Why processes end in the ways that they do, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Story(NamedTuple):
    """Why a process ended in this way, and what to do about it."""

    why: str
    fix: str


LEFT: Final = Story(
    "A rank that leaves with a failing status ends the job: the launcher stops the other ranks, "
    "wherever they are.",
    "Look at why the program leaves at this line on this rank and not on the others. If it may "
    "stop early, let all ranks decide it together and leave with status 0.",
)
ALL_LEFT: Final = Story(
    "All ranks left in the same way: the program itself decided to fail.",
    "Look at the condition of this exit, and at what the ranks wrote before it.",
)
ABORTED_WAITING: Final = Story(
    "A watchdog ends a process of which a collective has not ended within its timeout: this rank "
    "is a victim. Who did not come to the call, or came and did not go on, is another rank or the "
    "network, and nothing that was read tells which.",
    "Read what the other ranks wrote, those first of which nothing is here. Next time, keep the "
    "output of each rank (torchrun --log-dir DIR --redirects 3) and set "
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1.",
)
OUTSIDE: Final = Story(
    "Such a signal to all ranks comes from a launcher, a scheduler or a person; no fault of the "
    "program sends it.",
    "Ask who stopped the job: a time limit, a pre-emption, scancel, a signal to the launcher, or "
    "the failure of another node. The program need not change.",
)
ASKED_TO_END: Final = Story(
    "No fault of a program sends this signal: somebody ended this rank, and the others cannot go "
    "on without it.",
    "Ask who sent it: a script, a limit for single processes, the launcher of another node.",
)
OUT_OF_MEMORY: Final = Story(
    "While this job ran, the kernel's out-of-memory killer ended processes here, and it does so by "
    "SIGKILL: the memory of the host, or of the job's cgroup, was used up.",
    "Use less host memory on this node (data loader workers, pinned buffers, checkpoints that all "
    "ranks load at once), or ask for more. The kernel log names the process and its size.",
)
SHORT_OF_MEMORY: Final = Story(
    "The kernel, the scheduler or the container ended this process by SIGKILL because the memory "
    "that it may use was used up.",
    "Use less host memory on this node (data loader workers, pinned buffers, checkpoints that all "
    "ranks load at once), or ask for more (--mem, the memory limit of the container).",
)
TIME_LIMIT: Final = Story(
    "The scheduler ended the job at its time limit; no fault of the program does that.",
    "Ask for more time, or save checkpoints before the limit (sbatch --signal), and go on from "
    "them.",
)
PREEMPTED: Final = Story(
    "The scheduler ended the job to make room for another one; no fault of the program does that.",
    "Let the job be queued again, save checkpoints often, and go on from the last one.",
)
NODE_FAILED: Final = Story(
    "A node of the job failed, and the scheduler ended what ran on it and beside it.",
    "Leave the node out (--exclude) and start again from the last checkpoint; tell those who run "
    "the cluster which node it was.",
)
CANCELLED: Final = Story(
    "Somebody cancelled the job, or its launcher did after a failure of which nothing was read. "
    "SIGHUP comes when the terminal or the ssh session that started the job was closed.",
    "Ask who cancelled it; if nobody did, look for the first error in the output of the ranks. "
    "Start long jobs by a scheduler, or within tmux or screen.",
)
OF_CAUSES: Final[Mapping[str, Story]] = {
    "out-of-memory": SHORT_OF_MEMORY,
    "time-limit": TIME_LIMIT,
    "preempted": PREEMPTED,
    "node-failed": NODE_FAILED,
    "cancelled": CANCELLED,
}
FAILED: Final = Story(
    "The process left with a failing status, and its launcher stopped the others. Python does so "
    "with status 1 after an exception; the traceback is in the output of this rank.",
    "Read the last lines that this rank wrote to stderr. With torchrun, --log-dir DIR --redirects "
    "3 keeps them for each rank, and @record on main() puts the traceback into its summary.",
)
KILLED_UNSEEN: Final = Story(
    "SIGKILL comes from outside of the process, and leaves it no time to say anything. The most "
    "frequent sender is the kernel's out-of-memory killer; a scheduler, a container or a person "
    "sends it, too.",
    "Look for `Out of memory: Killed process` in dmesg or journalctl -k of its node, for oom_kill "
    "in what slurmstepd wrote, for OOMKilled in `kubectl describe pod`, then for a limit or a "
    "pre-emption in the log of the scheduler.",
)
BUS_ERROR: Final = Story(
    "SIGBUS comes where a page of a mapped file cannot be had: as a rule /dev/shm is full or too "
    "small, by which data loader workers and NCCL share memory.",
    "Look at `df -h /dev/shm` in the container. Make it larger (docker run --shm-size=16g or "
    "--ipc=host, an emptyDir with medium: Memory in Kubernetes), or use fewer workers.",
)
SEGMENTATION: Final = Story(
    "The process crashed in native code, below Python: it used memory that is not its own. Such an "
    "end prints no Python traceback.",
    "Run it again with `python -X faulthandler` for the line of Python, or look at the core file. "
    "Look first at extensions, and at versions of CUDA, NCCL and torch that do not fit together.",
)
KILLED: Final = Story(
    "SIGKILL comes from outside of the process, and leaves it no time to say anything. The "
    "kernel's out-of-memory killer has ended nothing here that was counted.",
    "Look in the scheduler's log for a limit or a pre-emption, and ask who may have killed it.",
)
CRASHED: Final = Story(
    "The process crashed in native code, below Python: such an end prints no Python traceback.",
    "Read the last lines that this rank wrote (an assertion of C++ or CUDA). Run it again with "
    "`python -X faulthandler` for the line of Python, or look at the core file.",
)
CRASHED_SEEN: Final = Story(
    "The process crashed in native code, below this line of Python: it used memory that is not its "
    "own, or ended itself on an error that it could not go on from.",
    "Look at what this line hands to native code, and at the core file. Look first at extensions, "
    "and at versions of CUDA, NCCL and torch that do not fit together.",
)
SHARED_MEMORY: Final = Story(
    "/dev/shm is full or too small: NCCL and data loader workers share memory there, and a "
    "container gets 64 MiB of it unless it is told otherwise.",
    "Look at `df -h /dev/shm` in the container. Make it larger (docker run --shm-size=16g or "
    "--ipc=host, an emptyDir with medium: Memory in Kubernetes), and remove what dead runs left "
    "there.",
)
