"""Check a command that is no script: a console script of a library, a launcher, a shell script.

`distdiag check -- accelerate launch train.py` runs the command, and its ranks join the run
(`agent.joining`).
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from distdiag.agent.attach import validated
from distdiag.agent.children import told_of
from distdiag.agent.joining import invite_to
from distdiag.agent.launch import read_launch
from distdiag.agent.program import Program, find_script
from distdiag.agent.verdict import newest_verdict
from distdiag.cli.torchrun import wait_for
from distdiag.config import Config
from distdiag.events.errors import UsageError
from distdiag.record.guard import warn
from distdiag.record.run_dir import attempts_of, open_run_dir

_LINE: Final = 4096
"""Longer is no first line of a script: Linux reads 256 bytes of it."""


def is_command(words: Sequence[str], script: str, args: Sequence[str]) -> bool:
    """Whether what follows the options on a command line names a command: it stands after ``--``.

    `words` are all of the line. A path that ends in .py is a script all the same.
    """
    before = len(words) - len(args) - 2
    is_marked = before >= 0 and words[before] == "--"
    return is_marked and not script.endswith(".py") and shutil.which(script) is not None


def find_command(name: str, args: Sequence[str]) -> Program | None:
    """Return the program that a console script of this Python is; None if it is anything else."""
    path = shutil.which(name) or name
    try:
        with Path(path).open("rb") as file:
            first, second = file.readline(_LINE), file.readline(_LINE)
    except OSError:
        return None
    # Where the path of Python is too long for the first line, pip lets a shell start it.
    line = second if first.startswith(b"#!/bin/sh") and b"exec'" in second else first
    named = line.replace(b"'''exec'", b"#!").split(b'"$0"')[0].removeprefix(b"#!")
    python = Path(os.fsdecode(named).strip().strip('"'))
    if not first.startswith(b"#!") or not python.name.startswith("python"):
        return None
    own = Path(sys.executable).parent.resolve()
    return find_script(path, args) if python.parent.resolve() == own else None


def run_command(command: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Run a command, observe the ranks that it starts, and return its status.

    That is 1 if the command ended with 0 and a finding reaches ``--fail-on``.

    Raises:
        UsageError: the run directory cannot be used, or the command cannot be started.

    """
    config: Config = validated(flags)
    launch = read_launch({})
    run_dir = open_run_dir(
        config.run_dir, launch, overwrite=config.overwrite, kept_runs=config.keep_runs
    )
    invite_to(run_dir.root, config, launch, tuple(command))
    try:
        status = wait_for(list(command), told_of(run_dir.root, dict(os.environ)))
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be started: {error.strerror}") from None
    if not any(attempts_of(run_dir.root)):
        warn(
            f"NOTHING WAS OBSERVED: no process of {command[0]} called init_process_group, or none "
            "of them could join (Python's options -E, -I and -S keep them from it)"
        )
        return status
    verdict = newest_verdict(run_dir)
    return status or (verdict.exit_status if verdict is not None else 0)
