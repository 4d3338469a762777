"""Start a checked run under torchrun, and find out the exit status that torchrun hides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from distdiag.agent.program import find_script
from distdiag.checks import load_checks
from distdiag.cli.options import to_arguments
from distdiag.cli.show import reaches
from distdiag.config import Config, load_config
from distdiag.dumps.process.proc import wait_for_pid_file
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError
from distdiag.findings.baseline import read_baseline
from distdiag.findings.finding import Outcome, Severity
from distdiag.record.private_file import make_private_folder
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import RunDir, attempts_of
from distdiag.record.runs_folder import RUNS_FOLDER, name_of_run
from distdiag.reports import read_report, reporter_names
from distdiag.reports.gate import script_status, shell_status

LAST_WORDS_S: Final = 15.0
"""The monitor has this long to complete the report when the launcher has ended."""


def run_checked(
    script: str,
    script_args: Sequence[str],
    flags: Mapping[str, Any],
    *,
    num_ranks: str,
    is_module: bool = False,
) -> int:
    """Run a script, or a module, under the check with these flags and return the real status.

    That is the status of the script if it failed, else 1 if a finding reaches ``--fail-on``.

    Raises:
        UsageError: the run cannot be started as asked.

    """
    config = load_config(flags)
    config.validate(codes=load_checks(), reporters=reporter_names())
    if config.baseline is not None:
        read_baseline(config.baseline)
    if not is_module:
        find_script(script, script_args)
    if find_spec("torch") is None:
        raise UsageError(f"torch is not installed for {sys.executable}")
    run_dir = config.run_dir or new_run_dir()
    _require_usable(run_dir, overwrite=config.overwrite)
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", num_ranks, "-m", "distdiag.check"),
        *to_arguments({**flags, "run_dir": run_dir}),
        *(["-m"] if is_module else []),
        *(script, *script_args),
    ]
    return real_status(wait_for(launcher), run_dir, config)


def _require_usable(run_dir: Path, *, overwrite: bool) -> None:
    """Refuse here what every rank would refuse: the launcher would hide their status."""
    try:
        make_private_folder(run_dir)
    except OSError as error:
        raise UsageError(f"run directory {run_dir} cannot be written: {error.strerror}") from None
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise UsageError(f"run directory {run_dir} cannot be written: no permission")
    if (run_dir / "run.json").exists() and not overwrite:
        raise UsageError(f"run directory {run_dir} already holds a run (see --overwrite)")


def new_run_dir() -> Path:
    """Return a name for a run directory that no other run has."""
    return Path(RUNS_FOLDER) / name_of_run(time.time(), os.getpid())


def empty_folder(script: Path, run_dir: Path | None) -> Path:
    """Return the folder for runs of a script that are compared.

    Raises:
        UsageError: there is no such script, or something is in the folder.

    """
    if not script.is_file():
        raise UsageError(f"script {str(script)!r} does not exist")
    folder = (run_dir or new_run_dir()).resolve()
    if any(folder.glob("*")):
        raise UsageError(f"run directory {folder} is not empty")
    return folder


def wait_for(launcher: list[str], environ: Mapping[str, str] | None = None) -> int:
    """Run the launcher, pass SIGTERM on to it, and return its status as a shell would.

    Raises:
        OSError: it cannot be started.

    """
    process = subprocess.Popen(launcher, env=environ)

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        while True:
            try:
                return shell_status(process.wait())
            except KeyboardInterrupt:
                # The terminal has told the launcher too; it still has its ranks to end.
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def real_status(launcher_status: int, run_dir: Path, config: Config) -> int:
    """Look up in the run directory what the launcher hides: it turns every failure into 1."""
    if launcher_status != 1:
        return launcher_status
    attempts = attempts_of(run_dir)
    if not attempts:
        return launcher_status
    last = RunDir(run_dir, max(attempts))
    # The monitor outlives the launcher; what it writes last is what counts.
    wait_for_pid_file(last.monitor_pid, LAST_WORDS_S)
    statuses = _exit_statuses(last.exit_status)
    failed = script_status(statuses)
    if failed:
        return failed
    if statuses and _is_clean(run_dir, config):
        # Every script ended well and a rank died after that, while its interpreter shut down.
        return 0
    return launcher_status


def _exit_statuses(path: Path) -> list[int]:
    """Return what the scripts of all ranks ended with, in the order in which they ended."""
    try:
        return list(msgspec.json.decode(read_regular(path), type=dict[str, int]).values())
    except (OSError, *UNDECODABLE):
        return []


def _is_clean(run_dir: Path, config: Config) -> bool:
    try:
        report = read_report(run_dir)
    except (UsageError, DamagedFileError):
        return False
    failed = config.fail_on != "never" and reaches(report, Severity(config.fail_on))
    return report.run.outcome is Outcome.FINISHED and not failed
