"""Starts a script twice in the same way, with the recorder of routing in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from distdiag.config.tasks import RoutingTask
from distdiag.dumps.process.proc import wait_for_pid_file
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Finding, Report
from distdiag.parity.routing.recordings import Recording
from distdiag.parity.runs import FINDINGS, GRACE_S, Script, end, last_words
from distdiag.record.private_file import make_private_folder
from distdiag.record.run_dir import RunDir
from distdiag.reports import read_report

RUNS: Final = ("first", "second")
TASK: Final = "task.json"


class Plan(NamedTuple):
    """How both runs are made, below one folder."""

    folder: Path
    script: Script
    num_ranks: int
    num_steps: int
    seed: int | None
    timeout_s: float


def record_twice(plan: Plan, say: Callable[[str], None]) -> tuple[Recording, Recording]:
    """Run the script twice, one run after the other, and return what each recorded.

    Raises:
        UsageError: a run failed or took too long.

    """
    for number, name in enumerate(RUNS, 1):
        say(f"run {number} of {len(RUNS)}")
        _run(plan, name)
    first, second = (_read(plan, name) for name in RUNS)
    return first, second


def _run(plan: Plan, name: str) -> None:
    folder = plan.folder / name
    make_private_folder(folder)
    RoutingTask(folder=str(folder / "records"), num_steps=plan.num_steps, seed=plan.seed).write(
        folder / TASK
    )
    log = folder / "output.log"
    status = _launch(_command(plan, folder), plan, log)
    is_recorded = len(list((folder / "records").glob("rank-*.json"))) == plan.num_ranks
    _keep_findings(folder)
    if status or not is_recorded:
        how = f"ended with status {status}" if status else "was not recorded on all ranks"
        how += "".join(f": {each.message}" for each in _disabled(own_report(plan.folder, name)))
        raise UsageError(f"the {name} run {how}{last_words(log)}; all that it wrote is in {log}")


def _keep_findings(folder: Path) -> None:
    """Keep what was found in this run alone under another name: one report is for both runs."""
    run_dir = RunDir(folder / "run", 0)
    wait_for_pid_file(run_dir.monitor_pid, GRACE_S)
    with suppress(FileNotFoundError):
        run_dir.report.rename(folder / FINDINGS)


def own_report(folder: Path, name: str) -> Report | None:
    """Return the report of one of the runs alone, None if nobody has written it."""
    try:
        return read_report(folder / name / FINDINGS)
    except (UsageError, DamagedFileError):
        return None


def _disabled(report: Report | None) -> list[Finding]:
    found = report.findings if report is not None else ()
    return [each for each in found if each.code == "DIA003"][:1]


def _command(plan: Plan, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(plan.num_ranks), "-m", "distdiag.check"),
        *("--run-dir", str(folder / "run"), "--overwrite", "--report", "json"),
        *("--profile", "light", "--select", "DIA,HNG", "--fail-on", "never", "--on-hang", "abort"),
        *("--routing-task", str(folder / TASK)),
        *(plan.script.path, *plan.script.arguments),
    ]


def _launch(command: list[str], plan: Plan, log: Path) -> int:
    environment = dict(os.environ)
    if plan.seed is not None:
        environment["PYTHONHASHSEED"] = str(plan.seed % 2**32)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            return process.wait(plan.timeout_s)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"the {log.parent.name} run did not end within {plan.timeout_s:g} s (--timeout); "
                f"what it wrote is in {log}"
            ) from None
        finally:
            end(process)


def _read(plan: Plan, name: str) -> Recording:
    try:
        return Recording(plan.folder / name / "records")
    except (DamagedFileError, OSError) as error:
        raise UsageError(f"the {name} run recorded nothing that can be read: {error}") from None
