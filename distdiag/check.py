"""Run a script under observation: ``torchrun … -m distdiag.check [options] train.py [args]``.

The script sees what it would see as ``python train.py``: its arguments, its folder first on the
path, itself as ``__main__``, its own exit status, and tracebacks that show only its own frames.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn

import click

from distdiag.agent.agent import RankAgent
from distdiag.agent.attach import start_agent, validated
from distdiag.agent.launch import read_launch
from distdiag.agent.program import (
    Program,
    find_command,
    find_module,
    find_script,
    is_command,
    run_as_main,
)
from distdiag.cli.options import check_options, module_option
from distdiag.events.errors import RankError, UsageError
from distdiag.probes.process.exceptions import strip_own_frames
from distdiag.record.guard import warn

_USAGE: Final = 2
_PEER_DELAY_S: Final = 0.5
"""Local rank 0 says what is wrong; the others wait, so that the launcher does
not kill it before."""

_LOCAL_RANK: Final = re.compile(r"--local[-_]rank=\d+")
"""What DeepSpeed's launcher and torch.distributed.launch put before all arguments, for the script.
The latter spells it with a hyphen since torch 2.0."""


def _observe(program: Program) -> None:
    """Run the program and tell the agent how it ended."""
    try:
        run_as_main(program)
    except SystemExit as error:
        if (agent := RankAgent.current) is not None:
            agent.will_exit(error)
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if (agent := RankAgent.current) is not None:
            agent.exit_status = 130 if is_interrupt else 1
            agent.exceptions.raised(error, error.__traceback__)
        _show_as_python_does(program, None if is_interrupt else agent)
        raise


def _show_as_python_does(program: Program, agent: RankAgent | None) -> None:
    """Let the traceback that will be printed show the script's own frames only."""
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sys.excepthook = hook
        # Python's own hook looks at the exception, others at the argument.
        error.__traceback__ = strip_own_frames(trace, program.path)
        hook(kind, error, error.__traceback__)
        if agent is not None:
            agent.wait_for_last_words()

    sys.excepthook = excepthook


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@check_options
@module_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def _command(script: str, args: tuple[str, ...], is_module: bool, **flags: object) -> Program:
    """Run SCRIPT with ARGS under observation; put torchrun or another launcher in front.

    SCRIPT may be the console script of a library, and after `--` any command.
    """
    launchers, words = click.get_current_context().obj
    given = (*launchers, *args)
    if is_module:
        program = find_module(script, given)
    elif is_command(words, script, args):
        program = _of_command(script, given, flags)
    else:  # torchrun takes a `--` for its own
        found = None if os.path.exists(script) else find_command(script, given)
        program = found or find_script(script, given)
    start_agent(validated(flags), tuple(program.argv), program.path)
    return program


def _of_command(name: str, args: tuple[str, ...], flags: Mapping[str, Any]) -> Program:
    """Return the program that a command is; one that this Python cannot run is started instead."""
    program = find_command(name, args)
    if program is not None:
        return program
    if not read_launch(os.environ).is_alone:
        raise UsageError(
            f"{name!r} is no script of this Python, so a rank cannot run it: put the tool in front "
            "of the launcher (distdiag check -- COMMAND)"
        )
    from distdiag.cli.commands import run_command  # which needs more than a rank does

    raise SystemExit(run_command((name, *args), flags))


def _refuse(message: str) -> NoReturn:
    if _is_first_of_node():
        warn(message)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(_USAGE))
        time.sleep(_PEER_DELAY_S)
    raise SystemExit(_USAGE)


def _is_first_of_node() -> bool:
    try:
        return read_launch(os.environ).local_rank == 0
    except (RankError, OSError):
        return True


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, start the agent, and run the script as ``__main__``."""
    is_launchers = bool(arguments) and _LOCAL_RANK.fullmatch(arguments[0]) is not None
    try:
        program = _command.main(
            args=list(arguments[is_launchers:]),
            prog_name="python -m distdiag.check",
            standalone_mode=False,
            obj=(tuple(arguments[:is_launchers]), arguments),
        )
    except click.ClickException as error:
        _refuse(error.format_message())
    except UsageError as error:
        _refuse(str(error))
    if not isinstance(program, Program):
        return  # --help was asked for, and shown
    _observe(program)


if __name__ == "__main__":
    main(sys.argv[1:])
