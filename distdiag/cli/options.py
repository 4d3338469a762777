"""The options of a checked run on the command line, and how they are spelled there."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar, get_args

import click
import msgspec

from distdiag.cli.show import report_option, verbose_option
from distdiag.config import FEWEST_SEGMENTS, KEYS, DumpTransport, FailOn, OnHang, Profile, Seconds

F = TypeVar("F", bound=Callable[..., Any])


def _comma_list(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    if value is None:
        return None
    words = tuple(word.strip() for word in value.split(",") if word.strip())
    if not words:
        raise click.BadParameter("it names nothing", ctx, param)
    return words


def _comma_lists(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...] | None:
    lists = [_comma_list(ctx, param, value) or () for value in values]
    return tuple(dict.fromkeys(chain.from_iterable(lists))) if lists else None


def codes(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    """Return the codes, or prefixes of codes, of an option of one command."""
    return tuple(code.strip() for code in value.split(",") if code.strip())


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, Seconds, strict=False)
    except msgspec.ValidationError:
        raise click.BadParameter(
            f"{value!r} is not a positive number of seconds", ctx, param
        ) from None


def _seconds_or_auto(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> float | str | None:
    return value if value == "auto" else _seconds(ctx, param, value)


def _choice(kind: object) -> click.Choice[str]:
    return click.Choice(get_args(kind))


_OPTIONS: Final = (
    click.option("--profile", type=_choice(Profile), help="How closely to observe [standard]."),
    click.option(
        "--select",
        callback=_comma_list,
        metavar="CODES",
        help="Run only these checks: COL,HNG001 [ALL].",
    ),
    click.option("--ignore", callback=_comma_list, metavar="CODES", help="Leave these checks out."),
    click.option(
        "--config", metavar="FILE", help="Read options from a TOML file [./distdiag.toml]."
    ),
    click.option("--run-dir", metavar="DIR", help="Keep events and report.json here."),
    click.option(
        "--overwrite/--no-overwrite",
        default=None,
        help="Use a run directory that already holds a run.",
    ),
    click.option(
        "--keep-runs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Keep the last N runs below distdiag-runs/ [20].",
    ),
    click.option(
        "--keep-events",
        type=click.IntRange(min=FEWEST_SEGMENTS),
        metavar="MIB",
        help="Keep so many MiB of the events of each rank, the newest [64].",
    ),
    click.option(
        "--report",
        multiple=True,
        callback=_comma_lists,
        metavar="NAMES",
        help="Show the report as: terminal,html,github,... [terminal,json]. report.json is always "
        "written.",
    ),
    click.option(
        "-v",
        "--verbose/--no-verbose",
        default=None,
        help="Show which checks looked, and why each of the others did not.",
    ),
    click.option(
        "-q",
        "--quiet/--no-quiet",
        default=None,
        help="Show errors only at the terminal.",
    ),
    click.option(
        "--fail-on", type=_choice(FailOn), help="Exit with 1 at a finding this bad [error]."
    ),
    click.option(
        "--baseline", metavar="FILE", help="Do not count the findings that this file knows."
    ),
    click.option(
        "--hang-timeout",
        callback=_seconds_or_auto,
        metavar="auto|SECONDS",
        help="No progress for this long is a hang [auto].",
    ),
    click.option("--on-hang", type=_choice(OnHang), help="What to do about a hang [report]."),
    click.option(
        "--dump-transport",
        type=_choice(DumpTransport),
        help="How stacks of a hang reach the node of rank 0 [auto].",
    ),
    click.option(
        "--strict/--no-strict",
        default=None,
        help="Compare collectives before they are issued and raise on a mismatch.",
    ),
    click.option(
        "--strict-timeout",
        callback=_seconds,
        metavar="SECONDS",
        help="How long --strict waits for the other ranks [30].",
    ),
    click.option(
        "--poison-empty/--no-poison-empty",
        default=None,
        help="Fill memory that nobody has written with NaN until the first step.",
    ),
    click.option(
        "--verify-sequence/--no-verify-sequence",
        default=None,
        help="Send numbered tokens through split and gather before the first backward pass.",
    ),
    click.option("--parity-task", metavar="FILE", hidden=True),  # given by `distdiag parity`
    click.option("--routing-task", metavar="FILE", hidden=True),  # by `distdiag moe-determinism`
)


class CompareOptions(TypedDict):
    """The options of a command that compares runs of a script."""

    num_steps: int
    timeout_s: float
    run_dir: Path | None
    report_formats: tuple[str, ...]
    verbose: bool
    script: Path
    script_args: tuple[str, ...]


_COMPARE_OPTIONS: Final = (
    click.option(
        "--steps",
        "num_steps",
        type=click.IntRange(min=1),
        default=10,
        metavar="N",
        help="End each run after N optimizer steps [10].",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="Give up if a run takes longer [1800].",
    ),
    click.option(
        "--run-dir", type=click.Path(path_type=Path), help="Keep recordings and report here."
    ),
    report_option(),
    verbose_option,
    click.argument("script", type=click.Path(path_type=Path)),
    click.argument("script_args", nargs=-1, type=click.UNPROCESSED),
)


def compare_options(command: F) -> F:
    """Give a click command the options of `CompareOptions`."""
    return reduce(lambda given, option: option(given), reversed(_COMPARE_OPTIONS), command)


def check_options(command: F) -> F:
    """Give a click command the options of a checked run, for `load_config`; None if not given."""
    return reduce(lambda given, option: option(given), reversed(_OPTIONS), command)


module_option: Final = click.option(
    "-m", "is_module", is_flag=True, help="Run a module, as `python -m` does."
)


def to_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return the command-line form of flags that `check_options` parsed."""
    arguments: list[str] = []
    for key in ("config", *KEYS):
        value = flags.get(key)
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments.append(f"--{flag}={_spell(value)}")
    return arguments


def _spell(value: str | float | Path | Iterable[str]) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
