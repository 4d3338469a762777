"""Starts the runs of a comparison, each on ranks of its own, at the same time where they fit."""

from __future__ import annotations

import ast
import operator
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

import psutil

from distdiag.config.tasks import ParityTask, RankSummary
from distdiag.dumps.process.proc import wait_for_pid_file
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.private_file import make_private_folder
from distdiag.record.run_dir import RunDir

# Arithmetic of whole numbers in the templates of arguments, and nothing else.

_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Return the value of an expression of whole numbers, names, and ``+ - * // %``.

    Raises:
        UsageError: it is something else, or divides by zero.

    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names)
    except (SyntaxError, ZeroDivisionError, _ForbiddenError) as error:
        known = ", ".join(sorted(names))
        raise UsageError(
            f"{{{expression}}} cannot be computed: {error} (there are: {known}; and + - * // %)"
        ) from None


class _ForbiddenError(Exception):
    pass


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise _ForbiddenError(f"{node.id!r} is unknown")
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise _ForbiddenError(f"{ast.unparse(node)!r} is not allowed")


# How many runs of a comparison fit on this machine at the same time.

SHARE_OF_MEMORY: Final = 0.8
"""Of the memory that is free now, runs at the same time may take so much."""
RANKS_PER_CORE: Final = 1.5
"""Starting, reading and writing leave cores idle, so that somewhat more ranks than cores pay."""

Slot = Mapping[str, str]
"""The environment of what runs beside others."""


class Need(NamedTuple):
    """What one run takes, as the recorded run showed."""

    num_ranks: int
    memory: int
    devices: frozenset[str]


def need_of(summaries: Iterable[RankSummary], num_ranks: int) -> Need:
    """Return what a run on so many ranks takes, from what all ranks of another one took.

    A run on fewer ranks has the batches and the shards of all in fewer processes.
    """
    found = list(summaries)
    devices = frozenset(device for summary in found for device in summary.devices)
    return Need(num_ranks, sum(summary.peak_memory for summary in found), devices)


def slots_for(need: Need, num_runs: int, most: int | None) -> list[Slot]:
    """Return the places for runs at the same time: one if they must go one after the other."""
    by_cores = int(RANKS_PER_CORE * num_cores()) // need.num_ranks
    free = SHARE_OF_MEMORY * psutil.virtual_memory().available
    by_memory = int(free // need.memory) if need.memory else 1
    number = min(num_runs, most or num_runs, by_cores, by_memory)
    if number < 2:
        return [{}]
    if need.devices <= {"cpu"}:
        return [_threads(number, need.num_ranks)] * number
    return _of_gpus(number, need) or [{}]


def num_cores() -> int:
    """Return how many processor cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _threads(number: int, num_ranks: int) -> Slot:
    """Share the cores out; a launcher gives each of several ranks one thread by itself."""
    if num_ranks > 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // number))}


def _of_gpus(number: int, need: Need) -> list[Slot]:
    """Give each run GPUs of its own; none if there are not enough of one kind."""
    if need.devices - {"cpu", "cuda"}:
        return []
    names = _gpu_names()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(map(str, range(len(names)))) if visible is None else visible.split(",")
    if len(set(names)) != 1 or len(gpus) > len(names):
        return []
    fitting = min(number, len(gpus) // need.num_ranks)
    parts = [gpus[i * need.num_ranks : (i + 1) * need.num_ranks] for i in range(fitting)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts] if fitting > 1 else []


def _gpu_names() -> list[str]:
    """Return the kinds of all GPUs that the driver knows."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, pynvml.NVMLError):
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


# ---

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
    from distdiag.parity.runs import evaluate

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
