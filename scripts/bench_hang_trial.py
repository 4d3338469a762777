"""One launch of `bench_hang_workload.py` under observation, with its terminal timed.

The latency counts from the moment in which a hang can be declared: the last call that any rank
recorded (or the fault, if that was later), plus the hang timeout if the line came later than that
(six times the timeout where the rank works). It ends when this program has read the line. A line
that came before the timeout needed none: two records contradict, ranks wait in a circle, a rank
has left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from distdiag.findings.finding import Report
from distdiag.findings.report_json import decode_report
from distdiag.record.event_reader import EventReader
from distdiag.record.run_dir import RunDir
from distdiag.record.wire import EventDecoder, Interner

__all__ = ["Plan", "Trial"]

WORKLOAD = Path(__file__).with_name("bench_hang_workload.py")
TIMEOUT_S = 3.0
WORKING_FACTOR = 6
BOUND_S = 150.0
GRACE_S = 20.0
MARK = "DISTDIAG_BENCH_MARK"


class Plan(NamedTuple):
    """What goes wrong in one run, and where."""

    kind: str
    world_size: int
    rank: int
    step: int


class Trial:
    """One run. `reported_ns` is when the first line about a finding was read (0: there was none).

    `ended` says that the job came to an end by itself, `left_behind` how many of its processes
    lived on and were killed.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Make the run, to its end."""
        self.plan = plan
        self.folder = folder
        self.lines: list[str] = []
        self.reported_ns = 0
        self.ended = True
        self.left_behind = 0
        self._run_dir = RunDir(folder / "run", 0)
        process = self._start()
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._finish(process)
        reader.join(GRACE_S)

    def _start(self) -> subprocess.Popen[str]:
        plan = self.plan
        options = ["--hang-timeout", f"{TIMEOUT_S:g}", "--on-hang", "abort", "--report", "json"]
        fault = ["--kind", plan.kind, "--rank", str(plan.rank), "--step", str(plan.step)]
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(plan.world_size), "-m", "distdiag.check"),
                *("--run-dir", str(self._run_dir.root), *options),
                *(str(WORKLOAD), *fault, "--folder", str(self.folder)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                if not self.reported_ns and line.startswith(
                    ("distdiag: error", "distdiag: warning")
                ):
                    self.reported_ns = time.monotonic_ns()
                self.lines.append(line)

    def _finish(self, process: subprocess.Popen[str]) -> None:
        try:
            process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self.ended = False
        deadline = time.monotonic() + (GRACE_S if self.ended else 0.0)
        while (living := self._living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for other in living:
            other.kill()
        psutil.wait_procs(living, timeout=GRACE_S)
        process.wait()
        self.left_behind = len(living) if self.ended else 0

    def _living(self) -> list[psutil.Process]:
        """Return the processes of the run, by what they inherited."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == str(self.folder)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def report(self) -> Report:
        """Read the report.

        Raises:
            OSError: there is none.
            DamagedFileError: it is none of ours.

        """
        return decode_report(self._run_dir.report.read_bytes())

    @property
    def latency_s(self) -> float | None:
        """The time from declaring to the line, or None if there was no line."""
        if not self.reported_ns:
            return None
        since_s = (self.reported_ns - self._stopped_ns()) / 1e9
        threshold_s = TIMEOUT_S * (WORKING_FACTOR if self.plan.kind == "busy" else 1)
        return since_s - threshold_s if since_s >= threshold_s else since_s

    def _stopped_ns(self) -> int:
        """Return when the last thing happened before the line."""
        times = [int(path.read_text()) for path in self.folder.glob("injected")]
        for rank in range(self.plan.world_size):
            decoder = EventDecoder(rank, Interner())
            for payload in EventReader(self._run_dir.folder, rank).payloads():
                event = decoder.decode(payload)
                if event is not None and event.time_ns <= self.reported_ns:
                    times.append(event.time_ns)
        return max(times, default=self.reported_ns)
