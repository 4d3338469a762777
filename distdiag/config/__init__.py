"""What a run is asked to do: defaults, overruled by a TOML file, overruled by flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from distdiag.config.ignores import IgnoreRule, ignores_of
from distdiag.config.numerics import USUAL, NumericsConfig, numerics_config_of
from distdiag.config.placement_rules import PlacementRule, rules_of
from distdiag.config.selection import EVERYTHING, Selection
from distdiag.config.subjects import (
    AuxLossConfig,
    RoutingConfig,
    SequenceConfig,
    aux_loss_config_of,
    routing_config_of,
    sequence_config_of,
)
from distdiag.events.errors import UNDECODABLE, DamagedFileError, UsageError

Profile = Literal["light", "standard"]
FailOn = Literal["error", "warning", "never"]
OnHang = Literal["report", "abort"]
DumpTransport = Literal["auto", "nccl", "tcp", "files"]

LONGEST_WAIT_S: Final = 1e8
Seconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_WAIT_S)]

FEWEST_SEGMENTS: Final = 4
"""Event files are kept in pieces of 1 MiB: the first one, the newest ones, and what is written."""

DEFAULT_FILE: Final = Path("distdiag.toml")
"""Read when it is in the current directory and no other file is named."""

WORKFLOW_REPORT: Final = "github"
"""The report that a step of GitHub Actions shows beside those that were asked for."""
FOR_PROGRAMS: Final = ("json",)
"""Who asks for no more than this wants nothing shown, such as a command that makes many runs."""

KEYS: Final[Mapping[str, Any]] = {
    "profile": Profile,
    "select": tuple[str, ...],
    "ignore": tuple[str, ...],
    "run_dir": str,
    "overwrite": bool,
    "keep_runs": Annotated[int, msgspec.Meta(ge=1)],
    "keep_events": Annotated[int, msgspec.Meta(ge=FEWEST_SEGMENTS)],
    "report": tuple[str, ...],
    "verbose": bool,
    "quiet": bool,
    "fail_on": FailOn,
    "baseline": str,
    "hang_timeout": Literal["auto"] | Seconds,
    "on_hang": OnHang,
    "dump_transport": DumpTransport,
    "strict": bool,
    "strict_timeout": Seconds,
    "poison_empty": bool,
    "verify_sequence": bool,
    "parity_task": str,
    "routing_task": str,
}
"""What a TOML file may set: the names of the flags, and the type of each value."""

TABLES: Final[Mapping[str, Callable[[object], Any]]] = {
    "plan": rules_of,
    "sequence": sequence_config_of,
    "routing": routing_config_of,
    "aux_loss": aux_loss_config_of,
    "numerics": numerics_config_of,
    "ignore": ignores_of,
}
"""The tables of a TOML file and what reads each of them; of these, only `ignore` has a flag."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run was asked for. `hang_timeout_s` is None when the threshold adapts to the run.

    `plan` is how tensors should be sharded, `sequence` what splits sequences, `routing` what
    routes tokens, `aux_loss` what balances experts, and `numerics` the thresholds of the checks of
    numbers, by the user's tables. `keep_events` is how many MiB of events are kept of each rank.
    Findings that `ignored` fits or `baseline` knows do not count.
    The file report.json is always written, whatever `report` says.
    """

    profile: Profile = "standard"
    select: tuple[str, ...] = (EVERYTHING,)
    ignore: tuple[str, ...] = ()
    run_dir: Path | None = None
    overwrite: bool = False
    keep_runs: int = 20
    keep_events: int = 64
    report: tuple[str, ...] = ("terminal", "json")
    verbose: bool = False
    quiet: bool = False
    fail_on: FailOn = "error"
    baseline: Path | None = None
    ignored: tuple[IgnoreRule, ...] = ()
    hang_timeout_s: float | None = None
    on_hang: OnHang = "report"
    dump_transport: DumpTransport = "auto"
    strict: bool = False
    strict_timeout_s: float = 30.0
    poison_empty: bool = False
    verify_sequence: bool = False
    parity_task: str = ""
    routing_task: str = ""
    plan: tuple[PlacementRule, ...] = ()
    sequence: SequenceConfig = SequenceConfig()
    routing: RoutingConfig = RoutingConfig()
    aux_loss: AuxLossConfig = AuxLossConfig()
    numerics: NumericsConfig = USUAL

    @property
    def active_modes(self) -> tuple[str, ...]:
        """The modes that may change the run, by the names of their flags."""
        modes = {
            "strict": self.strict,
            "poison-empty": self.poison_empty,
            "verify-sequence": self.verify_sequence,
            "parity": bool(self.parity_task),
            "moe-determinism": bool(self.routing_task),
        }
        return tuple(name for name, is_on in modes.items() if is_on)

    @property
    def selection(self) -> Selection:
        """Which checks run."""
        return Selection(self.select, self.ignore)

    def validate(self, *, codes: Collection[str], reporters: Collection[str]) -> None:
        """Make sure that the named checks and reports exist.

        Raises:
            UsageError: one does not.

        """
        self.selection.validate(codes)
        ignored = tuple(code for rule in self.ignored for code in rule.codes)
        Selection(ignore=ignored).validate(codes)
        for name in self.report:
            if name not in reporters:
                known = ", ".join(sorted(reporters))
                raise UsageError(f'unknown report "{name}" (there are: {known})')

    def to_json(self) -> bytes:
        """Return the form in which another process gets it."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def from_json(cls, text: bytes | str) -> Config:
        """Read what `to_json` wrote.

        Raises:
            DamagedFileError: the text is something else.

        """
        try:
            return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
        except UNDECODABLE as error:
            raise DamagedFileError(f"not a distdiag configuration: {error}") from None


def load_config(flags: Mapping[str, Any]) -> Config:
    """Merge the defaults, the TOML file and the flags of `check_options` (None: not given).

    Raises:
        UsageError: the file cannot be read or says something that cannot be done.

    """
    given = {key: value for key, value in flags.items() if value is not None and key in KEYS}
    settings = _file_settings(flags.get("config")) | given
    for name in ("hang_timeout", "strict_timeout"):
        if name in settings:
            value = settings.pop(name)
            settings[f"{name}_s"] = None if value == "auto" else float(value)
    if "run_dir" in settings:
        settings["run_dir"] = Path(settings["run_dir"])
    if "baseline" in settings:
        settings["baseline"] = Path(settings["baseline"]).absolute()
    config = Config(**settings)
    is_shown = config.report != FOR_PROGRAMS and WORKFLOW_REPORT not in config.report
    if is_shown and is_in_workflow(os.environ):
        return msgspec.structs.replace(config, report=(*config.report, WORKFLOW_REPORT))
    return config


def is_in_workflow(environ: Mapping[str, str]) -> bool:
    """Tell whether this is a step of a workflow of GitHub Actions, by the variable that it sets."""
    return environ.get("GITHUB_ACTIONS") == "true"


def _file_settings(named: str | Path | None) -> dict[str, Any]:
    if named is None and not DEFAULT_FILE.exists():
        return {}
    path = Path(named) if named is not None else DEFAULT_FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is no error of TOML
        raise UsageError(f"{path}: not valid TOML: {_first_line(error)}") from None
    settings: dict[str, Any] = {}
    for written, value in table.items():
        key = written.replace("-", "_")
        if key in settings:
            raise UsageError(f'{path}: key "{written}" is given twice')
        settings[key] = _file_value(path, written, key, value)
    if "ignore" in settings:
        settings["ignore"], settings["ignored"] = settings["ignore"]
    return settings


def _file_value(path: Path, written: str, key: str, value: object) -> object:
    if key in TABLES:
        try:
            return TABLES[key](value)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
    if key not in KEYS:
        close = get_close_matches(key, [*KEYS, *TABLES], n=1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        raise UsageError(f"{path}: unknown key {written!r}{hint}")
    kind = KEYS[key]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error)
        if get_origin(kind) is Literal:
            reason = f"expected one of {', '.join(get_args(kind))}, got {value!r}"
        raise UsageError(f'{path}: key "{written}": {_first_line(reason)}') from None


def _first_line(problem: object) -> str:
    return str(problem).partition("\n")[0]
