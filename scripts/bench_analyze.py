"""How long ``distdiag analyze`` takes for a large log, and how much memory, on one core.

    python scripts/bench_analyze.py [MiB]

The log has the lines of eight ranks, bars of progress, caught exceptions and one fault at its end.
Written are seconds of processor time and of the clock, and the most memory that all processes of
the command held together.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FAULT = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 9, in <module>',
    "    read(7)",
    "ValueError: shard 7 has 0 rows",
)
CAUGHT = (*FAULT[:3], "OSError: again", "retrying")
LOOK_S = 0.05
NUM_RANKS = 8


def write_log(path: Path, num_bytes: int) -> None:
    """Write a log of so many bytes."""
    step = size = 0
    with path.open("w") as log:
        while size < num_bytes:
            step += 1
            stamp = f"2025-01-01 10:{step // 60 % 60:02d}:{step % 60:02d},000"
            lines = [
                f"[rank{rank}]: {stamp} INFO train.py:88 step {step} loss {2 + rank / step:.4f} "
                f"grad_norm {1 + rank / 7:.3f} lr 1.2e-4\n"
                for rank in range(NUM_RANKS)
            ]
            if step % 50 == 0:
                lines.append(f"  50%|█████     | {step}/60000 [00:01<00:01,  2.10it/s]\r")
            if step % 1000 == 0:
                lines += [f"[rank3]: {line}\n" for line in CAUGHT]
            size += log.write("".join(lines))
        log.writelines(f"[rank2]: {line}\n" for line in FAULT)
        log.write("srun: error: node1: task 2: Exited with exit code 1\n")


def memory_of(pid: int) -> int:
    """Return the bytes that a process and those below it hold, shared pages counted in parts."""
    total = 0
    for each in [pid, *_children(pid)]:
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
    return total << 10


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *_children(child)]
    return found


def main() -> None:
    """Write the log, analyse it, and print what that took."""
    num_mib = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    core = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "train.log"
        write_log(log, num_mib << 20)
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "distdiag.cli", "analyze", "--report", "json", str(log)]
        os.sched_setaffinity(0, {core})
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        seen: list[int] = []

        def watch() -> None:
            while process.returncode is None:
                seen.append(memory_of(process.pid))
                time.sleep(LOOK_S)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        output, _ = process.communicate()
        watcher.join()
        clock_s = time.monotonic() - begun_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = "found" if b"shard 7 has 0 rows" in output else "not found"
    print(
        f"{num_mib} MiB: {used.ru_utime + used.ru_stime:.1f} s of processor time, {clock_s:.1f} s "
        f"by the clock, {max(seen) >> 20} MiB of memory; the fault was {found}"
    )


if __name__ == "__main__":
    main()
