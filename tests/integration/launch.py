"""Run a program on real ranks, plain or checked, bounded in time, and leave no process behind."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

import msgspec
import psutil

from distdiag.record.runs_folder import RUNS_FOLDER
from tests import forked

__all__ = [
    "Launch",
    "Launcher",
    "Outcome",
    "run_checked",
    "run_command",
    "run_plain",
    "with_report",
]

Launcher = Literal["forked", "torchrun"]
"""What starts the ranks: see `tests.forked`. With `torchrun` they are processes like a user's, and
so is the one process of a program without a launcher."""

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 150.0
# A monitor lives on for a moment after its ranks; whoever is still there later was left behind.
GRACE_S = 6.0
# About 7 % of clean gloo runs die at interpreter exit, when all work is done.
EXIT_ABORT = "terminate called without an active exception"
MAX_ATTEMPTS = 3


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended; `exit_status` is None when the time was up."""

    exit_status: int | None
    stdout: str
    stderr: str
    duration_s: float
    leftovers: tuple[str, ...]
    report: dict[str, Any] | None = None

    @property
    def aborted_at_exit(self) -> bool:
        """Tell whether gloo aborted the interpreter's exit, after the program's work was done."""
        failed = self.exit_status not in (0, None)
        return failed and EXIT_ABORT in self.stderr and "Traceback" not in self.stderr

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Return the findings that a correct program must not have."""
        findings = self.report["findings"] if self.report else []
        return [finding for finding in findings if finding["severity"] in ("warning", "error")]

    def reported(self) -> dict[str, dict[str, Any]]:
        """Return the findings above info by code, of a run that no probe has left alone."""
        assert self.report is not None, self.describe()
        assert self.leftovers == (), self.describe()
        found = {finding["code"]: finding for finding in self.report["findings"]}
        assert "DIA003" not in found, self.describe()
        return {code: each for code, each in found.items() if each["severity"] != "info"}

    def describe(self) -> str:
        """Return what a person needs to see when a test about this run fails."""
        ending = "time was up" if self.exit_status is None else f"exit status {self.exit_status}"
        parts = [f"{ending} after {self.duration_s:.1f} s"]
        if self.leftovers:
            parts.append("left behind: " + "; ".join(self.leftovers))
        for finding in self.alarms:
            parts.append(msgspec.json.format(msgspec.json.encode(finding)).decode())
        parts += ["--- stdout", self.stdout[-4000:], "--- stderr", self.stderr[-8000:]]
        return "\n".join(parts)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a script: by what, where, and with what beside its arguments."""

    launcher: Launcher = "forked"
    folder: Path | None = None
    environ: Mapping[str, str] = {}
    stdin: str = ""

    def plain(
        self,
        script: Path,
        args: Sequence[str] = (),
        *,
        nproc: int = 2,
        timeout: float = TIMEOUT_S,
    ) -> Outcome:
        """Run a script without the tool; `nproc=0` means without a launcher."""
        return _last_of_attempts(lambda: self._run([str(script), *args], nproc, timeout))

    def checked(
        self,
        script: Path,
        args: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        nproc: int = 2,
        timeout: float = TIMEOUT_S,
    ) -> Outcome:
        """Run a script behind the tool and return its report along with how it ended."""

        def run() -> Outcome:
            with tempfile.TemporaryDirectory(prefix="distdiag-test-") as temporary:
                run_dir = Path(temporary, "run")
                tool = ["-m", "distdiag.check", "--run-dir", str(run_dir), "--report", "json"]
                command = [*tool, *options, str(script), *args]
                outcome = self._run(command, nproc, timeout)
                return with_report(outcome, run_dir)

        return _last_of_attempts(run)

    def parity(self, arguments: Sequence[str], *, timeout: float = TIMEOUT_S) -> Outcome:
        """Run `distdiag parity` and return its report along with how it ended."""
        with tempfile.TemporaryDirectory(prefix="distdiag-test-") as temporary:
            run_dir = Path(temporary, "run")
            tool = ["-m", "distdiag.cli", "parity", "--run-dir", str(run_dir), "--report", "json"]
            outcome = self._run([*tool, *arguments], 0, timeout)
            return with_report(outcome, run_dir)

    def _run(self, command: list[str], nproc: int, timeout: float) -> Outcome:
        if self.launcher == "forked":
            return _run(partial(forked.start, command, nproc), timeout, self)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        anew = [sys.executable, *(torchrun if nproc else ()), *command]
        return _run(partial(_Process, anew), timeout, self)


run_plain = Launch().plain
run_checked = Launch().checked


def run_command(
    command: Sequence[str],
    folder: Path,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    timeout: float = TIMEOUT_S,
) -> Outcome:
    """Run a command in a folder as a user would, and return the report of the run below it."""

    def run() -> Outcome:
        shutil.rmtree(folder / RUNS_FOLDER, ignore_errors=True)
        how = Launch(folder=folder, environ=environ)
        outcome = _run(partial(_Process, list(command)), timeout, how)
        return with_report(outcome, folder / RUNS_FOLDER)

    return _last_of_attempts(run)


def _last_of_attempts(run: Callable[[], Outcome]) -> Outcome:
    for _ in range(MAX_ATTEMPTS):
        outcome = run()
        if not outcome.aborted_at_exit:
            break
    return outcome


class _Process:
    """A command, waited for like a `forked.Job`."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: Path | None,
        streams: Sequence[IO[str]],
    ) -> None:
        stdin, stdout, stderr = streams
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self._process.wait()


def _environment(mark: str) -> dict[str, str]:
    environment = dict(os.environ)
    # What a surrounding job or test run set would reach the ranks.
    for name in ("TORCH_DISTRIBUTED_DEBUG", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Without a terminal Python would keep the output of a killed process to itself.
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", forked.MARK: mark}


def _run(start: Callable[..., _Process | forked.Job], timeout: float, how: Launch) -> Outcome:
    mark = uuid.uuid4().hex
    started = time.monotonic()
    # Files and not pipes: a process left behind could keep a pipe open for ever.
    with (
        tempfile.TemporaryFile("w+") as stdin_file,
        tempfile.TemporaryFile("w+", errors="replace") as stdout_file,
        tempfile.TemporaryFile("w+", errors="replace") as stderr_file,
    ):
        stdin_file.write(how.stdin)
        stdin_file.seek(0)
        streams = (stdin_file, stdout_file, stderr_file)
        job = start(_environment(mark) | dict(how.environ), how.folder, streams)
        exit_status = job.wait(timeout)
        duration_s = time.monotonic() - started
        stacks = _dump_stacks(mark) if exit_status is None else ""
        leftovers = _kill_marked(mark, 0.0 if exit_status is None else GRACE_S)
        job.close()
        stdout_file.seek(0)
        stderr_file.seek(0)
        return Outcome(
            exit_status=exit_status,
            stdout=stdout_file.read(),
            stderr=stderr_file.read() + stacks,
            duration_s=duration_s,
            leftovers=leftovers if exit_status is not None else (),
        )


def _marked(mark: str) -> list[psutil.Process]:
    """Find the processes of a run by what they inherited, since sessions and parents change."""
    marked = []
    for process in psutil.process_iter():
        try:
            is_of_run = process.environ().get(forked.MARK) == mark
            if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
        except psutil.Error:
            continue
    return marked


def _kill_marked(mark: str, grace_s: float) -> tuple[str, ...]:
    """Wait for the processes of a run to go, kill the rest, and return what those were."""
    deadline = time.monotonic() + grace_s
    alive = _marked(mark)
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = _marked(mark)
    names = tuple(sorted(_command_of(process) for process in alive))
    while alive:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=1.0)
        alive = _marked(mark)
    return names


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200] or process.name()
    except psutil.Error:
        return f"pid {process.pid}"


def _dump_stacks(mark: str) -> str:
    """Show where a run stood when its time was up."""
    py_spy = str(Path(sysconfig.get_path("scripts"), "py-spy"))
    dumps = []
    for process in _marked(mark):
        command = [py_spy, "dump", "--nonblocking", "--pid", str(process.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as error:
            dumps.append(f"{_command_of(process)}: {error}")
            continue
        dumps.append(done.stdout or f"{_command_of(process)}: {done.stderr}")
    return "\n".join(["", "--- stacks when the time was up", *dumps])


def with_report(outcome: Outcome, run_dir: Path) -> Outcome:
    """Add the report below a run directory, if there is one, to how the run ended."""
    paths = list(run_dir.rglob("report.json"))
    if not paths:
        return outcome
    if len(paths) > 1:
        raise ValueError(f"expected one report.json below {run_dir}, found {len(paths)}")
    return msgspec.structs.replace(outcome, report=msgspec.json.decode(paths[0].read_bytes()))
