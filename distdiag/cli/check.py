"""``distdiag check``: run a script on several ranks of this machine under observation."""

import sys

import click

from distdiag.agent.program import is_command
from distdiag.cli.commands import run_command
from distdiag.cli.options import check_options, module_option
from distdiag.cli.torchrun import run_checked


def _number_of_ranks(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value in ("gpu", "cpu", "auto") or (value.isdecimal() and int(value) > 0):
        return value
    raise click.BadParameter(f"{value!r} is not a positive number, gpu, cpu or auto", ctx, param)


@click.command("check", context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc-per-node",
    default="2",
    callback=_number_of_ranks,
    metavar="N",
    help="How many ranks to start, or gpu, cpu, auto [2].",
)
@check_options
@module_option
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc_per_node: str,
    script: str,
    script_args: tuple[str, ...],
    is_module: bool,
    **flags: object,
) -> int:
    """Run SCRIPT on several ranks and check it.

    After `--` SCRIPT may be a command that starts ranks: distdiag check -- accelerate launch
    train.py.

    Exits with the status of the script if that failed, else with 1 if a finding reaches
    --fail-on, else with 0.
    """
    if not is_module and is_command(sys.argv, script, script_args):
        return run_command((script, *script_args), flags)
    return run_checked(script, script_args, flags, num_ranks=nproc_per_node, is_module=is_module)
