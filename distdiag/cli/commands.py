"""Check a command that is no script: a console script of a library, a launcher, a shell script.

`distdiag check -- accelerate launch train.py` runs the command, and its ranks join the run
(`agent.joining`).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from distdiag.agent.attach import validated
from distdiag.agent.children import told_of
from distdiag.agent.joining import invite_to
from distdiag.agent.launch import read_launch
from distdiag.agent.verdict import newest_verdict
from distdiag.cli.torchrun import wait_for
from distdiag.config import Config
from distdiag.events.errors import UsageError
from distdiag.record.guard import warn
from distdiag.record.run_dir import attempts_of, open_run_dir


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
