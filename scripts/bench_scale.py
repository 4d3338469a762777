#!/usr/bin/env python
"""Measure the analysis of large jobs on made-up evidence: ``scripts/bench_scale.py PART …``.

Part ``flight-recorder``: dumps of a job in which one rank goes wrong, read by ``distdiag analyze``
and by torch's own ``torchfrtrace``, side by side on the same files. Part ``merge``: 12,500 trees of
the stacks of 8 ranks each become one, and the odd groups are found in it. Prints tables for
docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench_scale_merge import bench_merge

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.findings.report_json import decode_report

LAYERS: Final = 32
GROUP_SIZE: Final = 8
FIRST_NS: Final = 1_795_847_328_050_130_391
TORCH: Final = "/opt/venv/lib/python3.11/site-packages/torch"
TORCHFRTRACE: Final = "torch.distributed.flight_recorder.fr_trace"
JSON: Final = ("--report", "json")
OPS: Final = ("_all_gather_base", "_reduce_scatter_base", "all_reduce")

Frames = list[dict[str, Any]]


class Fault(NamedTuple):
    """What one rank does at its last call: it is behind, or passes a wrong size or kind.

    With ``unnamed`` it is behind, and no dump says which groups there are, as gloo writes them.
    """

    name: str
    rank: int


class Outcome(NamedTuple):
    """How long a program took on the wall and on the processors, in s, and what came of it."""

    wall_s: float
    cpu_s: float
    status: int
    said: str


class Call(NamedTuple):
    """One call of one rank."""

    place: int
    group: tuple[str, str]
    seq_id: int
    op: str
    numel: int
    group_size: int
    is_done: bool


def write_dumps(folder: Path, num_ranks: int, num_entries: int, fault: Fault) -> None:
    """Write one dump per rank, as torch names them."""
    for rank in range(num_ranks):
        dump = make_dump(rank, num_ranks, num_entries, fault)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def make_dump(rank: int, num_ranks: int, num_entries: int, fault: Fault) -> dict[str, Any]:
    """Return the dump of one rank of a sharded and tensor-parallel training, in format 2.10."""
    first = rank // GROUP_SIZE * GROUP_SIZE
    near = (str(1 + rank // GROUP_SIZE), "tp")
    groups = {("0", "default_pg"): range(num_ranks), near: range(first, first + GROUP_SIZE)}
    config = {
        name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
        for (name, desc), ranks in groups.items()
        if fault.name != "unnamed"
    }
    is_faulty = rank == fault.rank
    num_made = num_entries - (is_faulty and fault.name in ("behind", "unnamed"))
    calls = []
    seq_ids = dict.fromkeys(groups, 0)
    for place in range(num_made):
        group = near if place % 4 == 2 else ("0", "default_pg")
        seq_ids[group] += 1
        wrong = fault.name if is_faulty and place == num_entries - 1 else ""
        calls.append(
            Call(
                place,
                group,
                seq_ids[group],
                "broadcast" if wrong == "kind" else OPS[place // LAYERS % len(OPS)],
                4096 * (place % LAYERS + 1) + (8 if wrong == "size" else 0),
                len(groups[group]),
                is_done=place < num_entries - 1,
            )
        )
    return {
        "version": "2.10",
        "pg_config": config,
        "pg_status": {},
        "comm_lib_version": "2.28.9",
        "entries": [_entry(call) for call in calls],
    }


def _entry(call: Call) -> dict[str, Any]:
    whole, part = [[call.numel * call.group_size]], [[call.numel]]
    inputs = whole if call.op == "_reduce_scatter_base" else part
    outputs = whole if call.op == "_all_gather_base" else part
    created_ns = FIRST_NS + 1_000_003 * call.place
    return {
        "frames": _stack(call.place % LAYERS),
        "record_id": call.place,
        "pg_id": int(call.group[0]),
        "process_group": call.group,
        "thread_name": "pt_main_thread",
        "thread_id": "140302237354880",
        "collective_seq_id": call.seq_id,
        "p2p_seq_id": 0,
        "op_id": call.seq_id,
        "profiling_name": f"nccl:{call.op}",
        "time_created_ns": created_ns,
        "input_sizes": inputs,
        "input_dtypes": ["BFloat16"],
        "output_sizes": outputs,
        "output_dtypes": ["BFloat16"],
        "state": "completed" if call.is_done else "scheduled",
        "time_discovered_started_ns": created_ns + 5_000 if call.is_done else None,
        "time_discovered_completed_ns": created_ns + 900_000 if call.is_done else None,
        "retired": call.is_done,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def _stack(layer: int) -> Frames:
    """Return 29 frames, innermost first, as of a layer that gathers its parameters."""
    inner = [
        ("all_gather_into_tensor", f"{TORCH}/distributed/distributed_c10d.py", 3920),
        ("wrapper", f"{TORCH}/distributed/c10d_logger.py", 81),
        *((f"step_{n}", f"{TORCH}/distributed/fsdp/part_{n}.py", 100 + n) for n in range(12)),
        ("_call_impl", f"{TORCH}/nn/modules/module.py", 1762),
        ("forward", "/home/user/train/model.py", 60 + layer),
        *((f"call_{n}", f"{TORCH}/nn/modules/part_{n}.py", 40 + n) for n in range(10)),
        ("train_step", "/home/user/train/loop.py", 88),
        ("main", "/home/user/train/train.py", 210),
        ("<module>", "/home/user/train/train.py", 240),
    ]
    return [_frame(*frame) for frame in inner]


@cache
def _frame(name: str, file: str, line: int) -> dict[str, Any]:
    # The recorder writes each frame once and refers to it.
    return {"name": name, "filename": file, "line": line}


def run_timed(command: list[str]) -> Outcome:
    """Run a program and take the time; it may use the processors that this process may use."""
    with tempfile.TemporaryFile() as output:
        started_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started_s
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
    return Outcome(wall_s, used.ru_utime + used.ru_stime, process.returncode, said)


def bench_flight_recorder(options: argparse.Namespace) -> None:
    """Compare with torchfrtrace on the same files, for each fault."""
    num_cores = len(os.sched_getaffinity(0))
    num_all = options.ranks * options.entries
    print(f"{options.ranks} ranks x {options.entries} entries, {num_cores} cores\n")
    print("| fault of one rank | program | wall s | us per entry | CPU s | names |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.fault:
        fault = Fault(name, options.culprit if options.culprit is not None else options.ranks // 2)
        with tempfile.TemporaryDirectory() as folder:
            write_dumps(Path(folder), options.ranks, options.entries, fault)
            ours = run_timed([sys.executable, "-m", "distdiag.cli", "analyze", folder, *JSON])
            theirs = run_timed([sys.executable, "-m", TORCHFRTRACE, folder])
        for program, outcome, named in (
            ("distdiag analyze", ours, named_by_distdiag(ours)),
            ("torchfrtrace", theirs, named_by_torchfrtrace(theirs)),
        ):
            per_entry = f"{outcome.wall_s / num_all * 1e6:.1f}"
            print(
                f"| {name}: rank {fault.rank} | {program} | {outcome.wall_s:.1f} | {per_entry} "
                f"| {outcome.cpu_s:.1f} | {named} |"
            )
        print(f"\n{name}: {theirs.wall_s / ours.wall_s:.1f} times as fast\n")


def named_by_distdiag(outcome: Outcome) -> str:
    """Return the codes and culprits of the errors that were found."""
    report = decode_report(outcome.said[outcome.said.index("{") :].encode())
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    return "; ".join(f"{finding.code} {finding.ranks.phrase()}" for finding in errors) or "nobody"


def named_by_torchfrtrace(outcome: Outcome) -> str:
    """Return the ranks that it calls culprits or missing, or how it failed."""
    culprits = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", outcome.said)}
    missing = re.findall(r"missing ranks: (?:\{|set\()?([\d, ]+)", outcome.said)
    parts = [f"culprits {RankSet(culprits)}"] if culprits else []
    parts += [f"missing {ranks.strip()}" for ranks in dict.fromkeys(missing)]
    return "; ".join(parts) or f"nobody (status {outcome.status})"


def main() -> None:
    """Run the part that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    recorder = parts.add_parser("flight-recorder", help="distdiag analyze against torchfrtrace")
    recorder.add_argument("--ranks", type=int, default=1024)
    recorder.add_argument("--entries", type=int, default=2000)
    recorder.add_argument("--fault", nargs="+", default=["behind", "size", "kind", "unnamed"])
    recorder.add_argument("--culprit", type=int, help="the rank that goes wrong [the middle one]")
    recorder.set_defaults(run=bench_flight_recorder)
    merge = parts.add_parser("merge", help="trees of stacks of 100,000 ranks become one")
    merge.set_defaults(run=bench_merge)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
