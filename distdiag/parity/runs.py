"""Starts the runs of a comparison, each on ranks of its own, at the same time where they fit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from distdiag.dumps.proc import wait_for_pid_file
from distdiag.errors import DamagedFileError, UsageError
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.room import Slot
from distdiag.parity_task import ParityTask
from distdiag.private_file import make_private_folder
from distdiag.run_dir import RunDir

GRACE_S: Final = 10.0
FINDINGS: Final = "findings.json"
TASK: Final = "task.json"


class Configuration(NamedTuple):
    """One way to run the script: on so many ranks, with these arguments more."""

    label: str
    num_ranks: int
    arguments: tuple[str, ...] = ()


class Script(NamedTuple):
    """The script that is compared with itself, and its arguments in every run."""

    path: str
    arguments: tuple[str, ...]


class Planned(NamedTuple):
    """One run that is to be made."""

    name: str
    configuration: Configuration
    task: ParityTask
    is_reference: bool


class FailedRunError(UsageError):
    """The script itself did not run to the end."""


class Runs:
    """The runs of one comparison; their recordings are below one folder."""

    def __init__(self, folder: Path, script: Script, timeout_s: float) -> None:
        """Start nothing yet. A run that takes longer than `timeout_s` ends the comparison."""
        self._folder = folder
        self._script = script
        self._timeout_s = timeout_s
        self._live: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def run_all(self, planned: Sequence[Planned], slots: Sequence[Slot]) -> list[RecordedRun]:
        """Make these runs, as many at the same time as there are slots for.

        Runs of one script may get into each other's way (a port, a file): what fails beside others
        runs once more alone.

        Raises:
            UsageError: as of `run`.

        """
        free: SimpleQueue[Slot] = SimpleQueue()
        for slot in slots:
            free.put(slot)

        def run(each: Planned) -> RecordedRun | Slot:
            slot = free.get()
            try:
                return self.run(each, slot)
            except FailedRunError:
                if len(slots) == 1:
                    raise
                return slot
            finally:
                free.put(slot)

        with ThreadPoolExecutor(len(slots)) as pool:
            futures = [pool.submit(run, each) for each in planned]
            try:
                made = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
        return [
            found if isinstance(found, RecordedRun) else self.run(each, found)
            for each, found in zip(planned, made, strict=True)
        ]

    def _stop(self) -> None:
        """End all that runs, and let nothing start."""
        self._is_stopped = True
        for process in list(self._live):
            end(process)

    def run(self, planned: Planned, slot: Slot) -> RecordedRun:
        """Run the script once and return what it recorded.

        Raises:
            FailedRunError: the script failed or recorded nothing.
            UsageError: it took too long, or could not be given the batches.

        """
        name, configuration, task, _ = planned
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        make_private_folder(folder)
        task.write(folder / TASK)
        log = folder / "output.log"
        status = self._launch(self._command(planned, folder), configuration.label, log, slot)
        self._keep_findings(folder)
        label = configuration.label
        try:
            recorded = RecordedRun(Path(task.folder), label)
        except (DamagedFileError, OSError):
            raise FailedRunError(self._failure(label, status, log)) from None
        if recorded.problem:
            raise UsageError(f"{label} cannot be given the same batches: {recorded.problem}")
        missing = configuration.num_ranks - len(recorded.summaries)
        if status or missing or not recorded.num_steps:
            raise FailedRunError(self._failure(label, status, log))
        return recorded

    def _command(self, planned: Planned, folder: Path) -> list[str]:
        configuration = planned.configuration
        # What is found in a run is told of those that are compared with the reference alone.
        light = ("--profile", "light", "--select", "DIA,HNG") if planned.is_reference else ()
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(configuration.num_ranks), "-m", "distdiag.check"),
            *("--run-dir", str(folder / "run"), "--overwrite", "--report", "json", *light),
            *("--fail-on", "never", "--on-hang", "abort", "--parity-task", str(folder / TASK)),
            self._script.path,
            *self._script.arguments,
            *configuration.arguments,
        ]

    def _launch(self, command: Sequence[str], label: str, log: Path, slot: Slot) -> int:
        environment = {**os.environ, **slot}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            self._live.add(process)
            try:
                if self._is_stopped:
                    raise UsageError(f"{label}: stopped")
                return process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                raise UsageError(
                    f"{label} did not end within {self._timeout_s:g} s (--timeout); "
                    f"what it wrote is in {log}"
                ) from None
            finally:
                self._live.discard(process)
                end(process)

    def _keep_findings(self, folder: Path) -> None:
        """Keep what was found in this run alone under another name: one report is for all runs."""
        run_dir = RunDir(folder / "run", 0)
        wait_for_pid_file(run_dir.monitor_pid, GRACE_S)
        with suppress(FileNotFoundError):
            run_dir.report.rename(folder / FINDINGS)

    def _failure(self, label: str, status: int, log: Path) -> str:
        how = f"ended with status {status}" if status else "ended without an optimizer step"
        return f"{label} {how}{last_words(log)}; all that it wrote is in {log}"


def end(process: subprocess.Popen[bytes]) -> None:
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


def last_words(log: Path) -> str:
    """Return what a rank said last before the launcher's own account begins."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("[rank") and line.partition("]:")[2].strip()]
    return f" ({said[-1].strip()})" if said else ""


def task_for(folder: Path, settings: Mapping[str, object], **more: object) -> ParityTask:
    """Return the task of one run, recorded below `folder`."""
    return ParityTask(folder=str(folder / "records"), **{**settings, **more})  # type: ignore[arg-type]


def filled_in(template: str, **names: int) -> tuple[str, ...]:
    """Return the arguments of a template such as ``--batch-size {global_batch//world_size}``.

    Raises:
        UsageError: it names something unknown or is no arithmetic of whole numbers.

    """
    from distdiag.parity.arithmetic import evaluate

    pieces: list[str] = []
    rest = template
    while "{" in rest:
        before, _, after = rest.partition("{")
        expression, brace, rest = after.partition("}")
        if not brace:
            raise UsageError(f"--per-rank {template!r}: a brace is not closed")
        pieces += [before, str(evaluate(expression, names))]
    return tuple("".join([*pieces, rest]).split())


def sources_of(recorded: RecordedRun) -> Sequence[int]:
    """Return one rank of each data coordinate of a run."""
    return [coordinate[0] for coordinate in recorded.coordinates]
