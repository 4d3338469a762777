"""Makes the runs of a comparison: starts a script under torchrun and returns what it recorded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from distdiag.config.selection import Selection
from distdiag.config.tasks import ParityTask, RecordingTask, RoutingTask
from distdiag.dumps.process.proc import Process, wait_for_end
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Report
from distdiag.parity.slots import Slot
from distdiag.record.private_file import make_private_folder
from distdiag.record.run_dir import RunDir
from distdiag.reports import read_report

GRACE_S: Final = 10.0
"""A launcher that is told to end may take so long."""
MONITOR_S: Final = 60.0
"""A monitor beside ranks that have ended: it may have just been started, among many processes."""
RECORDS: Final = "records"
_FINDINGS: Final = "findings.json"
_TASK: Final = "task.json"
_TASK_OPTIONS: Final = {ParityTask: "--parity-task", RoutingTask: "--routing-task"}
_BESIDE_LEAVING: Final = Selection(ignore=("COL", "HNG"))
"""What may be found where ranks leave after their last steps: peers miss those that left."""
_ONLY_HANGS: Final = ("--profile", "light", "--select", "DIA,HNG")


class Script(NamedTuple):
    """The script that is compared with itself, and its arguments in every run."""

    path: str
    arguments: tuple[str, ...]


class RunSpec(NamedTuple):
    """One run that is to be made.

    Its files are below the folder `name`; messages call it `label`. With `is_checked` all checks
    look at it, else those of hangs only. The rest is what it has besides the script and its
    arguments.
    """

    name: str
    label: str
    num_ranks: int
    task: RecordingTask
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    is_checked: bool = False


class HasSummaries(Protocol):
    """What the ranks of a run recorded; each rank that did so has a summary."""

    @property
    def summaries(self) -> Mapping[int, Any]:
        """The summaries by rank."""


Recorded = TypeVar("Recorded", bound=HasSummaries)


class FailedRunError(UsageError):
    """The script itself did not run to the end."""


class Launcher(Generic[Recorded]):
    """Makes the runs of one comparison below one folder."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        timeout_s: float,
        read: Callable[[Path, str], Recorded],
    ) -> None:
        """Start nothing yet. A run that takes longer than `timeout_s` ends the comparison.

        `read` returns what the ranks recorded in a folder; the label is that of the run.
        """
        self._folder = folder
        self._script = script
        self._timeout_s = timeout_s
        self._read = read
        self._live: set[subprocess.Popen[bytes]] = set()
        self._left: set[str] = set()
        """The runs whose ranks had all they were asked for, when one failed for want of another."""
        self._is_stopped = False

    def run_all(self, specs: Sequence[RunSpec], slots: Sequence[Slot]) -> list[Recorded]:
        """Make these runs, as many at the same time as there are slots for.

        Runs of one script may get into each other's way (a port, a file): what fails beside others
        runs once more alone.

        Raises:
            UsageError: as of `run`.

        """
        free: SimpleQueue[Slot] = SimpleQueue()
        for slot in slots:
            free.put(slot)

        def run(spec: RunSpec) -> tuple[Recorded | None, Slot]:
            slot = free.get()
            try:
                return self.run(spec, slot), slot
            except FailedRunError:
                if len(slots) == 1:
                    raise
                return None, slot
            finally:
                free.put(slot)

        with ThreadPoolExecutor(len(slots)) as pool:
            futures = [pool.submit(run, spec) for spec in specs]
            try:
                made = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
        return [
            self.run(spec, slot) if recorded is None else recorded
            for spec, (recorded, slot) in zip(specs, made, strict=True)
        ]

    def _stop(self) -> None:
        """End all that runs, and let nothing start."""
        self._is_stopped = True
        for process in list(self._live):
            _end(process)

    def run(self, spec: RunSpec, slot: Slot) -> Recorded:
        """Run the script once and return what it recorded.

        Raises:
            FailedRunError: the script failed, or not all ranks recorded something.
            UsageError: it took too long.

        """
        folder = self._folder / spec.name
        shutil.rmtree(folder, ignore_errors=True)
        make_private_folder(folder)
        spec.task.write(folder / _TASK)
        log = folder / "output.log"
        status = self._launch(spec, log, slot)
        self._keep_findings(folder)
        try:
            recorded = self._read(Path(spec.task.folder), spec.label)
        except (DamagedFileError, OSError) as error:
            raise self._failed(spec, status, log, str(error)) from None
        is_complete = len(recorded.summaries) == spec.num_ranks and all(
            each.num_steps >= spec.task.num_steps for each in recorded.summaries.values()
        )
        if status and is_complete:
            self._left.add(spec.name)
        elif status or len(recorded.summaries) < spec.num_ranks:
            raise self._failed(spec, status, log, "not all ranks recorded something")
        return recorded

    def report(self, name: str) -> Report | None:
        """Return what the checks found in one of the runs; None if nobody has written it."""
        try:
            report = read_report(self._folder / name / _FINDINGS)
            if name not in self._left:
                return report
            kept = (each for each in report.findings if _BESIDE_LEAVING.selects(each.code))
            return msgspec.structs.replace(report, findings=tuple(kept))
        except (UsageError, DamagedFileError):
            return None

    def _launch(self, spec: RunSpec, log: Path, slot: Slot) -> int:
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(spec, log.parent),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **spec.environment, **slot},
            )
            self._live.add(process)
            try:
                if self._is_stopped:
                    raise UsageError(f"{spec.label}: stopped")
                return process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                raise UsageError(
                    f"{spec.label} did not end within {self._timeout_s:g} s (--timeout); "
                    f"its output is in {log}"
                ) from None
            finally:
                self._live.discard(process)
                _end(process)

    def _command(self, spec: RunSpec, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(spec.num_ranks), "-m", "distdiag.check"),
            *("--run-dir", str(folder / "run"), "--overwrite", "--report", "json"),
            *(() if spec.is_checked else _ONLY_HANGS),
            *("--fail-on", "never", "--on-hang", "abort"),
            *(_TASK_OPTIONS[type(spec.task)], str(folder / _TASK)),
            *(self._script.path, *self._script.arguments, *spec.arguments),
        ]

    def _keep_findings(self, folder: Path) -> None:
        """Keep what was found in this run alone under another name: one report is for all runs."""
        run_dir = RunDir(folder / "run", 0)
        wait_for_monitor(run_dir, MONITOR_S)
        with suppress(FileNotFoundError):
            run_dir.report.rename(folder / _FINDINGS)

    def _failed(self, spec: RunSpec, status: int, log: Path, problem: str) -> FailedRunError:
        how = f"ended with status {status}" if status else f"cannot be compared: {problem}"
        report = self.report(spec.name)
        disabled = [f for f in report.findings if f.code == "DIA003"] if report is not None else []
        how += f": {disabled[0].message}" if disabled else ""
        return FailedRunError(f"{spec.label} {how}{_last_words(log)}; its output is in {log}")


def wait_for_monitor(run_dir: RunDir, timeout_s: float) -> None:
    """Wait until the monitor has ended, and all who would start it again.

    The guard writes them down before a rank begins; a monitor names itself when it has begun, which
    may be after the end of a short run.
    """
    deadline = time.monotonic() + timeout_s
    with suppress(OSError, ValueError):
        for line in run_dir.monitor_pids.read_text(encoding="ascii").splitlines():
            process = Process(*map(int, line.split()))
            if not process.is_gone:
                wait_for_end([process], max(0.0, deadline - time.monotonic()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, and its ranks with it."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _last_words(log: Path) -> str:
    """Return what a rank said last before the launcher's own account begins."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("[rank") and line.partition("]:")[2].strip()]
    return f" ({said[-1].strip()})" if said else ""
