"""Starts the runs of a comparison, one after the other, each on ranks of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from distdiag.dumps.proc import wait_for_pid_file
from distdiag.errors import DamagedFileError, UsageError
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity_task import ParityTask
from distdiag.run_dir import RunDir

GRACE_S: Final = 10.0
FINDINGS: Final = "findings.json"


class Configuration(NamedTuple):
    """One way to run the script: on so many ranks, with these arguments more."""

    label: str
    num_ranks: int
    arguments: tuple[str, ...] = ()


class Script(NamedTuple):
    """The script that is compared with itself, and its arguments in every run."""

    path: str
    arguments: tuple[str, ...]


class Runs:
    """The runs of one comparison; their recordings are below one folder."""

    def __init__(self, folder: Path, script: Script, timeout_s: float) -> None:
        """Start nothing yet. A run that takes longer than `timeout_s` ends the comparison."""
        self._folder = folder
        self._script = script
        self._timeout_s = timeout_s

    def run(self, name: str, configuration: Configuration, task: ParityTask) -> RecordedRun:
        """Run the script once and return what it recorded.

        Raises:
            UsageError: the script failed, recorded nothing, or could not be given the batches.

        """
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        task_file = folder / "task.json"
        task.write(task_file)
        log = folder / "output.log"
        status = self._launch(configuration, folder, task_file, log)
        self._keep_findings(folder)
        label = configuration.label
        try:
            recorded = RecordedRun(Path(task.folder), label)
        except (DamagedFileError, OSError):
            raise UsageError(self._failure(label, status, log)) from None
        if recorded.problem:
            raise UsageError(f"{label} cannot be given the same batches: {recorded.problem}")
        missing = configuration.num_ranks - len(recorded.summaries)
        if status or missing or not recorded.num_steps:
            raise UsageError(self._failure(label, status, log))
        return recorded

    def _launch(
        self, configuration: Configuration, folder: Path, task_file: Path, log: Path
    ) -> int:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(configuration.num_ranks), "-m", "distdiag.check"),
            *("--run-dir", str(folder / "run"), "--overwrite", "--report", "json"),
            *("--fail-on", "never", "--on-hang", "abort", "--parity-task", str(task_file)),
            self._script.path,
            *self._script.arguments,
            *configuration.arguments,
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                return process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                raise UsageError(
                    f"{configuration.label} did not end within {self._timeout_s:g} s (--timeout); "
                    f"what it wrote is in {log}"
                ) from None
            finally:
                _end(process)

    def _keep_findings(self, folder: Path) -> None:
        """Keep what was found in this run alone under another name: one report is for all runs."""
        run_dir = RunDir(folder / "run", 0)
        wait_for_pid_file(run_dir.monitor_pid, GRACE_S)
        with suppress(FileNotFoundError):
            run_dir.report.rename(folder / FINDINGS)

    def _failure(self, label: str, status: int, log: Path) -> str:
        how = f"ended with status {status}" if status else "ended without an optimizer step"
        return f"{label} {how}{_last_words(log)}; all that it wrote is in {log}"


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
