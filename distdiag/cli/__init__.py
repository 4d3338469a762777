"""Entry point ``distdiag``: one command in each module, which is loaded when it is used."""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Final, NoReturn

import click

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.record.visible import visible

__all__ = ["main"]

USAGE_STATUS: Final = 2
_COMMANDS: Final = {
    "analyze": "analyze",
    "baseline": "baseline",
    "case": "case",
    "check": "check",
    "compare": "compare",
    "demo": "demo",
    "diagnose": "diagnose",
    "doctor": "doctor",
    "dump": "dump",
    "explain": "explain",
    "lint": "lint",
    "list": "list",
    "metrics": "metrics",
    "moe-determinism": "moe",
    "parity": "parity",
    "report": "report",
    "schema": "schema",
}
"""The module of each command below this package; what click runs there is named `command`."""
_HELP: Final = """Find out why a distributed PyTorch training run is wrong or stuck.

\b
Start here:
  distdiag demo                    a healthy and a sick script, and the report of each
  distdiag check train.py          run a script on two ranks and check it
  torchrun ... -m distdiag.check train.py
                                   the same under your own launcher
  distdiag explain COL003          what a finding means and how to fix it
"""


class _Commands(click.Group):
    """Loads a command only when it is used: every rank loads this package, and none needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the command of this name."""
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"{__name__}.{_COMMANDS[cmd_name]}").command
        assert isinstance(command, click.Command)
        return command


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from distdiag.reports.base import tool_version

    click.echo(f"distdiag {tool_version() or '(not installed)'}")
    ctx.exit()


@click.group(cls=_Commands, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def _distdiag() -> None:
    pass


def main(args: Sequence[str] | None = None, *, prog_name: str = "distdiag") -> NoReturn:
    """Run a command and exit with its status; every mistake of usage is one line and status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A report may hold characters that the terminal's encoding has not.
            stream.reconfigure(errors="backslashreplace")
    # Not `list(...)`: that name is the module of a command here, once it has been loaded.
    given = [*(sys.argv[1:] if args is None else args)] or ["--help"]
    try:
        status = _distdiag.main(given, prog_name, standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message())
    except (UsageError, DamagedFileError) as error:
        _fail(str(error))
    except click.Abort:
        sys.exit(128 + signal.SIGINT)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(problem: str) -> NoReturn:
    click.echo(f"distdiag: {visible(' '.join(problem.split()))}", err=True)
    sys.exit(USAGE_STATUS)
