"""What the kernel says of a rank: what it waits for, its memory, its children."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from distdiag.dumps.base import RankWitness
from distdiag.dumps.blocked_call import BlockedCall, read_blocked_call
from distdiag.dumps.cgroup_memory import read_cgroup_memory
from distdiag.dumps.proc import proc_text, status_fields
from distdiag.event import Observed, Value

STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, and not yet waited for by its parent",
    "X": "dead",
    "I": "idle",
}
MOST_CHILDREN: Final = 64
MOST_THREADS: Final = 4096

_STUCK: Final = "D"
_ZOMBIE: Final = "Z"


class Task:
    """One process or thread as the kernel sees it at one moment.

    `state` is the kernel's letter, `wchan` the kernel function that it sleeps in (empty where that
    is secret), `call` the system call.
    """

    def __init__(self, pid: int, thread: int | None = None) -> None:
        """Read it; `state` is empty where there is none."""
        folder = "" if thread is None else f"task/{thread}/"
        head, _, rest = proc_text(pid, f"{folder}stat").rpartition(")")
        self.pid = pid
        self.name = head.partition("(")[2]
        self.state = rest.split()[0] if rest else ""
        wchan = "" if self.state == "R" else proc_text(pid, f"{folder}wchan")
        self.wchan = "" if wchan == "0" else wchan
        self.call = BlockedCall() if self.state == "R" else read_blocked_call(pid, thread)

    def __str__(self) -> str:
        """Return what it does, as a part of a sentence."""
        text = STATES.get(self.state, f"in state {self.state}")
        if str(self.call):
            text += f" in {self.call}"
        return f"{text} ({self.wchan})" if self.wchan else text


class KernelView(RankWitness):
    """Read ``/proc``. Nothing is read there for which a stuck process would make us wait."""

    name = "kernel"

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Tell of a rank's main thread, its memory and its children."""
        main = Task(pid)
        if not main.state:
            return self.observed(rank, error="the process is gone")
        stuck = _stuck_threads(pid)
        children = _children(pid)
        values: dict[str, Value] = {
            "state": main.state,
            "doing": str(main),
            "wchan": main.wchan,
            "syscall": main.call.name,
            "blocked_on": main.call.target,
            "file_system": main.call.file_system,
            "uninterruptible_threads": ", ".join(f"{task.name}: {task}" for task in stuck),
            "num_children": len(children),
        }
        values = {name: value for name, value in values.items() if value != ""}
        values |= _memory(pid) | read_cgroup_memory(proc_text(pid, "cgroup"))
        values |= {f"child {child.pid}": f"{child.name}: {child}" for child in children}
        return self.observed(rank, _summary(main, stuck, children), values)


def _summary(main: Task, stuck: Sequence[Task], children: Sequence[Task]) -> str:
    parts = [f"the main thread is {main}"]
    if main.state == _STUCK:
        parts.append("mostly a file system or a device that does not answer")
    elif stuck:
        parts.append(f"the thread {stuck[0].name} is {stuck[0]}")
    waiting = [child for child in children if child.state == _STUCK]
    dead = [child for child in children if child.state == _ZOMBIE]
    if waiting:
        parts.append(f"the child {waiting[0].pid} ({waiting[0].name}) is {waiting[0]}")
    if dead:
        parts.append(f"the child {dead[0].pid} ({dead[0].name}) is {dead[0]}")
    return "; ".join(parts)


def _stuck_threads(pid: int) -> list[Task]:
    """Return the threads beside the main thread that are in uninterruptible sleep."""
    try:
        numbers = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    others = [number for number in numbers[:MOST_THREADS] if number != pid]
    return [Task(pid, number) for number in others if _letter(pid, number) == _STUCK]


def _letter(pid: int, thread: int) -> str:
    rest = proc_text(pid, f"task/{thread}/stat").rpartition(")")[2].split()
    return rest[0] if rest else ""


def _children(pid: int) -> list[Task]:
    """Return the descendants (workers of data loaders, among others), those in trouble first.

    The monitor is a child of a rank too, and what it starts: they are left out.
    """
    try:
        found = psutil.Process(pid).children(recursive=True)
        own = psutil.Process()
        if own in found:
            found = [child for child in found if child not in (own, *own.children(recursive=True))]
    except psutil.Error:
        return []
    tasks = [task for child in found if (task := Task(child.pid)).state]
    return sorted(tasks, key=lambda task: (task.state not in "DZTt", task.pid))[:MOST_CHILDREN]


def _memory(pid: int) -> dict[str, Value]:
    fields = status_fields(proc_text(pid, "status"))
    found: dict[str, Value] = {}
    for name, key in (("rss_bytes", "VmRSS"), ("swap_bytes", "VmSwap")):
        if fields.get(key, "").endswith(" kB"):
            found[name] = int(fields[key].split()[0]) * 1024
    for name, text in (
        ("num_threads", fields.get("Threads", "")),
        ("tracer_pid", fields.get("TracerPid", "0")),
        ("oom_score", proc_text(pid, "oom_score")),
    ):
        if text.isdigit() and (name, text) != ("tracer_pid", "0"):
            found[name] = int(text)
    return found
