"""Entry point ``distdiag``: start a checked run, and read what runs and checks have to say."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from distdiag.analysis import Progress
from distdiag.analysis import analyze as analyze_files
from distdiag.checks import Check, load_checks
from distdiag.cli.dump import dump
from distdiag.cli.lint import lint
from distdiag.cli.moe import moe_determinism
from distdiag.cli.options import check_options
from distdiag.cli.parity import parity
from distdiag.cli.torchrun import new_run_dir, reaches, run_checked
from distdiag.config.selection import Selection
from distdiag.demo import HEALTHY, SICK
from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.findings.finding import Outcome, Report, Severity
from distdiag.findings.report_json import report_schema
from distdiag.lint.base import Rule
from distdiag.lint.rules import load_rules
from distdiag.replay import replay_source
from distdiag.reports import Reporter, load_reporter, read_report, reporter_names

USAGE_STATUS: Final = 2


class _Commands(click.Group):
    """A group whose every mistake of usage is one line and exit status 2."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]  # noqa: ANN401
        """Run a command and exit with its status."""
        extra.setdefault("prog_name", "distdiag")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                # A report may hold characters that the terminal's encoding has not.
                stream.reconfigure(errors="backslashreplace")
        try:
            given = sys.argv[1:] if args is None else list(args)
            status = super().main(given or ["--help"], standalone_mode=False, **extra)
        except click.ClickException as error:
            _fail(error.format_message())
        except (UsageError, DamagedFileError) as error:
            _fail(str(error))
        except click.Abort:
            sys.exit(128 + signal.SIGINT)
        sys.exit(status if isinstance(status, int) else 0)


def _fail(problem: str) -> NoReturn:
    click.echo(f"distdiag: {' '.join(problem.split())}", err=True)
    sys.exit(USAGE_STATUS)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    try:
        number = version("distdiag")
    except PackageNotFoundError:
        number = "(not installed)"
    click.echo(f"distdiag {number}")
    ctx.exit()


def _number_of_ranks(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if value in ("gpu", "cpu", "auto") or (value.isdecimal() and int(value) > 0):
        return value
    raise click.BadParameter(f"{value!r} is not a positive number, gpu, cpu or auto", ctx, param)


def _told_ranks(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    told = {}
    for value in values:
        file, equals, rank = value.rpartition("=")
        if not (file and equals and rank.isdecimal()):
            raise click.BadParameter(f"{value!r} is not FILE=RANK", ctx, param)
        told[file] = int(rank)
    return told


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Find out why a distributed PyTorch training run is wrong or stuck.

    \b
    Start here:
      distdiag demo                    a healthy and a sick script, and the report of each
      distdiag check train.py          run a script on two ranks and check it
      torchrun ... -m distdiag.check train.py
                                       the same under your own launcher
      distdiag explain COL003          what a finding means and how to fix it
    """  # noqa: D301


@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc-per-node",
    default="2",
    callback=_number_of_ranks,
    metavar="N",
    help="How many ranks to start, or gpu, cpu, auto [2].",
)
@check_options
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def check(nproc_per_node: str, script: str, script_args: tuple[str, ...], **flags: Any) -> int:  # noqa: ANN401
    """Run SCRIPT on several ranks of this machine and check it.

    Exits with the status of the script if that failed, else with 1 if a finding reaches
    --fail-on, else with 0.
    """
    return run_checked(script, script_args, flags, num_ranks=nproc_per_node)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    *("--report", "--format", "name"),
    default="terminal",
    help="Show it as terminal or json [terminal]; pytest writes a test that replays a finding of "
    "collectives.",
)
def report(path: Path, name: str) -> None:
    """Show the report of a run again. PATH is a report.json or a run directory."""
    if name == "pytest":
        click.echo(replay_source(path), nl=False)
        return
    _check_reporter(name)
    _show(read_report(path), name)


def _check_reporter(name: str) -> None:
    if name not in reporter_names():
        raise UsageError(f'unknown report "{name}" (there are: {", ".join(reporter_names())})')


def _show(shown: Report, name: str) -> None:
    click.echo(_reporter_for_stdout(name).render(shown), nl=False)


def _reporter_for_stdout(name: str) -> Reporter:
    reporter = load_reporter(name)
    if name != "terminal" or not sys.stdout.isatty():
        return reporter()
    return reporter(width=shutil.get_terminal_size().columns, color="NO_COLOR" not in os.environ)


@main.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH..."
)
@click.option(
    "--rank",
    "told",
    multiple=True,
    metavar="FILE=RANK",
    callback=_told_ranks,
    help="Whose dump a file is, where neither its name nor its content says so.",
)
@click.option(
    "--report", "name", default="terminal", help="Show it as terminal or json [terminal]."
)
@click.option("--select", default="", metavar="CODES", help="Judge by these checks only.")
@click.option("--ignore", default="", metavar="CODES", help="Judge without these checks.")
def analyze(
    paths: tuple[Path, ...], told: dict[str, int], name: str, select: str, ignore: str
) -> int:
    """Judge what a job left behind: PATH is a dump, a run directory, a folder or an archive.

    Dumps of the flight recorder (pickle or JSON), of py-spy, gdb and faulthandler, logs, and run
    directories, in any mixture. Nothing in them is run. Exits with 1 if an error was found.
    """
    _check_reporter(name)
    with Progress() as progress:
        judged = analyze_files(
            paths,
            told=told,
            selection=Selection(_codes(select), _codes(ignore)),
            progress=progress.show,
            complain=progress.complain,
        )
    _show(judged, name)
    return 1 if reaches(judged, Severity.ERROR) else 0


def _codes(text: str) -> tuple[str, ...]:
    return tuple(code.strip() for code in text.split(",") if code.strip())


@main.command()
@click.argument("code")
def explain(code: str) -> None:
    """Say what a check detects, why it matters and how to fix it. CODE may be its name."""
    checks = _catalogue()
    by_word = {word: check for check in checks.values() for word in (check.code, check.name)}
    wanted = by_word.get(code) or by_word.get(code.upper())
    if wanted is None:
        close = get_close_matches(code.upper(), checks, n=3) or get_close_matches(
            code, by_word, n=3
        )
        hint = f" (did you mean {', '.join(close)}?)" if close else " (distdiag list shows all)"
        raise UsageError(f'unknown code "{code}"{hint}')
    click.echo(f"{wanted.code} {wanted.name} ({wanted.severity})\n\n{_documentation(wanted)}")


def _catalogue() -> dict[str, type[Check[Any]] | type[Rule]]:
    """Return the checks, and the rules of the static companion that are no checks, by code."""
    found: dict[str, type[Check[Any]] | type[Rule]] = {**load_rules()}
    found.update(load_checks())
    return {code: found[code] for code in sorted(found)}


def _documentation(check: type[Check[Any]] | type[Rule]) -> str:
    return inspect.cleandoc(check.__doc__ or "This check has no documentation.")


@main.command("list")
def list_checks() -> None:
    """List all checks, one a line. Those marked static are found by distdiag lint only."""
    click.echo(f"{'code':6}  {'severity':8}  {'name':32}  what it detects")
    for check in _catalogue().values():
        first = _documentation(check).partition("\n")[0]
        static = "static: " if issubclass(check, Rule) else ""
        click.echo(f"{check.code:6}  {check.severity:8}  {check.name:32}  {static}{first}")


@main.command()
def schema() -> None:
    """Print the JSON Schema of report.json."""
    click.echo(json.dumps(report_schema(), indent=2))


@main.command()
def demo() -> int:
    """Run a healthy and a sick script on two ranks and show the report of each."""
    healthy = _demo_run(HEALTHY, "a healthy script: nothing should be found")
    sick = _demo_run(SICK, "a sick script: each rank decides by itself when to stop")
    went_well = (
        healthy.run.outcome is Outcome.FINISHED
        and not reaches(healthy, Severity.WARNING)
        and reaches(sick, Severity.ERROR)
    )
    click.echo(f"demo: {'went as it should' if went_well else 'did NOT go as it should'}")
    return 0 if went_well else 1


def _demo_run(script: Path, what: str) -> Report:
    run_dir = new_run_dir() / script.stem
    click.echo(f"demo: {script.name}, {what}")
    flags = {"run_dir": str(run_dir), "report": ("json",), "on_hang": "abort", "hang_timeout": 10.0}
    status = run_checked(str(script), (), flags, num_ranks="2")
    click.echo(f"demo: {script.name} ended with status {status}\n")
    shown = read_report(run_dir)
    _show(shown, "terminal")
    click.echo()
    return shown


main.add_command(dump)
main.add_command(lint)
main.add_command(parity)
main.add_command(moe_determinism)


if __name__ == "__main__":
    main()
