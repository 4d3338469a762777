#!/usr/bin/env python
"""Five hangs on two GPUs: who is named, how the stacks travel, and how soon the report is there.

Needs two GPUs. ``python scripts/bench_nccl_hangs.py [--dump-transport nccl]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pynvml

WORKLOAD = Path(__file__).with_name("bench_nccl_hang_workload.py")
KINDS = ("skipped-collective", "other-kind", "opposite-groups", "full-queue", "free-memory")
HANG_TIMEOUT_S = 10.0
LONGEST_S = 90.0


def gpu_pids() -> set[int]:
    """Return the processes that hold memory on any GPU."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    return {
        each.pid
        for handle in handles
        for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    }


def start(kind: str, folder: Path, transport: str) -> subprocess.Popen[str]:
    """Start the job with its output in a file."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "distdiag.check", "--run-dir", str(folder / "run"), "--report", "json"),
        *("--hang-timeout", str(HANG_TIMEOUT_S), "--on-hang", "abort"),
        *("--dump-transport", transport, str(WORKLOAD), kind, str(folder)),
    ]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report as it is now, empty before there is one."""
    path = folder / "run" / "report.json"
    return json.loads(path.read_text()) if path.exists() else {}


def reported(report: dict[str, Any]) -> str:
    """Return codes and ranks of the errors."""
    errors = [f for f in report["findings"] if f["severity"] != "info"]
    return ", ".join(f"{f['code']} {f['name']} on {f['ranks']}" for f in errors) or "nothing"


def has_stacks(report: dict[str, Any]) -> bool:
    """Whether evidence came by some way from elsewhere."""
    return bool(report.get("run", {}).get("dump_transport"))


def run(kind: str, transport: str) -> str:
    """Run one hang and return the row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start(kind, folder, transport)
        begun_s = time.monotonic()
        before: set[int] = set()
        dumped_s = 0.0
        while job.poll() is None and time.monotonic() - begun_s < LONGEST_S:
            time.sleep(0.05)
            if not dumped_s and len(list(folder.glob("mark-*"))) == 2 and not before:
                before = gpu_pids()
            report = read_report(folder)
            if not dumped_s and report.get("findings") and has_stacks(report):
                dumped_s = time.time()
        job.kill()
        ended_s = time.time()
        marks = [path.stat().st_mtime for path in folder.glob("mark-*")]
        report = read_report(folder)
        ranks = {info["pid"] for info in report["run"]["ranks"]}
        if not dumped_s or "--verbose" in sys.argv:
            print((folder / "output").read_text()[-3000:])
        declared_s = max(marks) + HANG_TIMEOUT_S
        strangers = len(before - ranks)
        return (
            f"| {kind} | {reported(report)} | {report['run'].get('dump_transport') or 'none'} | "
            f"{dumped_s - declared_s:.1f} s | {ended_s - declared_s:.1f} s | "
            f"{strangers or 'none'} |"
        )


def main() -> None:
    """Print one row for each hang."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dump-transport", default="nccl")
    parser.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--verbose", action="store_true", help="show what the jobs wrote")
    arguments = parser.parse_args()
    pynvml.nvmlInit()
    print(
        "| hang | said | carried by | from declaring to the report with stacks | to the end |"
        " processes of the tool on the GPUs before |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in arguments.only:
        print(run(kind, arguments.dump_transport), flush=True)


if __name__ == "__main__":
    main()
