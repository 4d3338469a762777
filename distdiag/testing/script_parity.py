"""Compares a script on one rank with itself on several, by ``distdiag parity``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from distdiag.errors import UsageError

FOUND_STATUS: Final = 1
"""With this status the command says that something differs."""
GRACE_S: Final = 20.0
"""The command ends the ranks of its runs within this time when it is interrupted."""


class ScriptOptions(NamedTuple):
    """What a script is compared with itself on, for how long, and with which arguments."""

    world_sizes: Sequence[int]
    num_steps: int
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()


def script_problem(script: Path, chosen: ScriptOptions) -> str | None:
    """Return what differs, as the report shows it; None if nothing does.

    Raises:
        UsageError: the runs cannot be compared, or the command failed.

    """
    sizes = ",".join(str(size) for size in (1, *chosen.world_sizes))
    command = [sys.executable, "-m", "distdiag.cli", "parity", "--world-sizes", sizes]
    command += ["--steps", str(chosen.num_steps), *chosen.options, str(script)]
    status, report, told = _run([*command, *chosen.arguments])
    if not status:
        return None
    if status == FOUND_STATUS and report:
        return report
    raise UsageError(told or f"distdiag parity ended with status {status}")


def _run(command: Sequence[str]) -> tuple[int, str, str]:
    """Run to the end and return the status and what was written to stdout and stderr."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        written, told = process.communicate()
    except BaseException:  # such as the timeout of the test: no rank may be left behind
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return process.returncode, written.strip(), told.strip()
