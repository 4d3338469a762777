"""Run one zoo script on a few ranks, bounded in time, and leave no process behind."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from tests.zoo.score import Report, read_report

__all__ = ["Mode", "Run", "run_script"]

REPOSITORY = Path(__file__).resolve().parents[2]
POLL_S = 0.2
# A monitor lives on for a moment after its ranks; whoever is still there later was left behind.
GRACE_S = 15.0
RUNS_OF_PARITY = 4

Mode = Literal["distdiag", "detail", "plain"]
Outcome = Literal["finished", "failed", "hung"]

_EXIT_ABORT = "terminate called without an active exception"
_RANK_TRACEBACK = re.compile(r"^\[rank\d+\]: Traceback", re.MULTILINE)
_NAMED_MISMATCH = re.compile(
    r"Detected mismatch between collectives|failed to pass monitoredBarrier"
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """How one script ended; `status` is None when the time was up."""

    outcome: Outcome
    status: int | None
    duration_s: float
    log: str
    left_behind: tuple[str, ...] = ()
    report: Report | None = None
    report_error: str = ""

    @property
    def aborted_at_exit(self) -> bool:
        """Tell whether gloo aborted the interpreter's exit, after the script's work was done."""
        return _EXIT_ABORT in self.log and not _RANK_TRACEBACK.search(self.log)

    @property
    def names_mismatch(self) -> bool:
        """Tell whether torch itself named the disagreeing ranks."""
        return bool(_NAMED_MISMATCH.search(self.log))


class _ProcessTree:
    """Remember every descendant seen, since a dead parent hides its children."""

    def __init__(self, pid: int) -> None:
        self.seen = {psutil.Process(pid)}

    def refresh(self) -> None:
        for process in list(self.seen):
            try:
                self.seen.update(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def kill(self, grace_s: float) -> tuple[str, ...]:
        """Wait for the processes to go, kill the rest, and return the names of those."""
        self.refresh()
        _, alive = psutil.wait_procs(self.seen, timeout=grace_s)
        names = tuple(sorted(_command_of(process) for process in alive))
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=GRACE_S)
        return names


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:160] or process.name()
    except psutil.Error:
        return f"pid {process.pid}"


def _parity_command(script: Path, run_dir: Path, parity_args: Sequence[str]) -> list[str]:
    options = ["--run-dir", str(run_dir), "--report", "json", *parity_args]
    return [sys.executable, "-m", "distdiag.cli", "parity", *options, str(script)]


def _command(script: Path, mode: Mode, run_dir: Path, num_ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(num_ranks)]
    if mode != "distdiag":
        return [*launcher, str(script)]
    options = ["--run-dir", str(run_dir), "--hang-timeout", "5", "--on-hang", "abort"]
    return [*launcher, "-m", "distdiag.check", *options, "--report", "json", str(script)]


def _environment(mode: Mode) -> dict[str, str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env.pop("TORCH_DISTRIBUTED_DEBUG", None)
    if mode == "detail":
        env["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    if mode == "distdiag":
        # The scripts run in a folder of their own, where a checkout is not importable.
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    return env


def _wait(process: subprocess.Popen[bytes], tree: _ProcessTree, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        tree.refresh()
        time.sleep(POLL_S)
    return process.poll()


def _outcome(status: int | None, log: str) -> Outcome:
    if status is None:
        return "hung"
    # About 7 % of clean gloo runs die at interpreter exit, when all work is done.
    if status == 0 or (_EXIT_ABORT in log and not _RANK_TRACEBACK.search(log)):
        return "finished"
    return "failed"


def run_script(
    script: Path,
    mode: Mode,
    timeout_s: float,
    *,
    num_ranks: int = 2,
    parity_args: Sequence[str] | None = None,
) -> Run:
    """Run a script under torchrun in a temporary folder and return how it ended.

    With `parity_args` distdiag compares it with itself on one rank, which takes several runs.
    """
    is_compared = mode == "distdiag" and parity_args is not None
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        run_dir = Path(folder, "run")
        work_dir = Path(folder, "work")
        work_dir.mkdir()
        # A file and not a pipe: a process left behind could keep a pipe open for ever.
        log_path = Path(folder, "log")
        started = time.monotonic()
        with log_path.open("wb") as log_file:
            process = subprocess.Popen(
                _parity_command(script, run_dir, parity_args or ())
                if is_compared
                else _command(script, mode, run_dir, num_ranks),
                cwd=work_dir,
                env=_environment(mode),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            tree = _ProcessTree(process.pid)
            try:
                status = _wait(
                    process, tree, RUNS_OF_PARITY * timeout_s if is_compared else timeout_s
                )
                duration_s = time.monotonic() - started
            finally:
                left_behind = tree.kill(0.0 if process.poll() is None else GRACE_S)
                process.wait()
        log = log_path.read_text(errors="replace")
        report, report_error = read_report(run_dir) if mode == "distdiag" else (None, "")
    return Run(
        outcome=_outcome(status, log),
        status=status,
        duration_s=duration_s,
        log=log,
        left_behind=left_behind if status is not None else (),
        report=report,
        report_error=report_error,
    )
