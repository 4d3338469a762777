"""The trace of a run on real ranks, and a trace of torch's profiler on the same time."""

import json
from pathlib import Path
from typing import Any

from tests import forked
from tests.integration.launch import run_command

SCRIPT = Path(__file__).parent / "workflow" / "profiled.py"
LINES = SCRIPT.read_text().splitlines()
LINE = 1 + LINES.index("        dist.all_reduce(torch.ones(1))")


def test_what_was_recorded_lies_where_the_profiler_saw_it(tmp_path: Path) -> None:
    check = [forked.stand_in(), "-m", "distdiag.cli", "check", "--report", "perfetto", str(SCRIPT)]
    outcome = run_command(check, tmp_path)
    assert outcome.exit_status == 0, outcome.describe()
    (run_dir,) = (tmp_path / "distdiag-runs").glob("2*")
    trace = json.loads((run_dir / "report.trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    for rank in (0, 1):
        steps = named(trace, rank, "step 0") + named(trace, rank, "step 1")
        assert len(steps) == 2
        assert steps[0]["ts"] + steps[0]["dur"] <= steps[1]["ts"] + steps[1]["dur"]

    merged = merge(run_dir, tmp_path)
    for rank in (0, 1):
        (block,) = named(merged, rank, "sum over all ranks")
        calls = [
            event
            for event in merged["traceEvents"]
            if event.get("cat") == "distdiag"
            and event["pid"] == rank
            and event["name"].startswith("all_reduce")
            and f"profiled.py:{LINE} " in event["args"]["at"]
        ]
        # The program pauses 0.3 s before and after the call.
        (call,) = calls
        assert block["ts"] < call["ts"] < block["ts"] + block["dur"]


def named(trace: dict[str, Any], rank: int, name: str) -> list[dict[str, Any]]:
    """Return the slices of a rank that have a name."""
    return [
        event
        for event in trace["traceEvents"]
        if event.get("name") == name and event.get("pid") == rank and event["ph"] == "X"
    ]


def merge(run_dir: Path, folder: Path) -> dict[str, Any]:
    """Return the trace of a run with those of the profiler, which lie in a folder."""
    traces = [folder / "profile-0.json", folder / "profile-1.json.gz"]
    options = [word for trace in traces for word in ("--trace", str(trace))]
    words = ["report", str(run_dir), "--format", "perfetto", *options]
    done = forked.run(["-m", "distdiag.cli", *words], timeout=100)
    assert done.returncode == 0, done.stderr
    merged: dict[str, Any] = json.loads(done.stdout)
    return merged
