"""Start and stop the agent of this process, whatever stands in the way."""

import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from distdiag.agent.agent import RankAgent
from distdiag.agent.children import is_told
from distdiag.agent.joining import invite, stand_alone
from distdiag.agent.launch import read_launch
from distdiag.config import KEYS, Config, load_config
from distdiag.events.errors import RankError, UsageError
from distdiag.record.guard import Guard, guarded, unobserved

_PATHS: Final = ("run_dir", "baseline")


def validated(flags: Mapping[str, Any]) -> Config:
    """Return what these flags and the TOML file ask for.

    Raises:
        UsageError: that cannot be done.

    """
    config = load_config(flags)
    default = Config()
    if (config.select, config.ignore, config.ignored) != (default.select, default.ignore, ()):
        from distdiag.checks import load_checks
        from distdiag.reports import reporter_names

        config.validate(codes=load_checks(), reporters=reporter_names())
    elif config.report != default.report:
        from distdiag.reports import reporter_names

        config.validate(codes=(), reporters=reporter_names())
    if config.baseline is not None:
        from distdiag.findings.baseline import read_baseline

        read_baseline(config.baseline)
    return config


def start_agent(config: Config, command: tuple[str, ...], main_script: str | None) -> None:
    """Observe this process from now on. Where that fails it is said, and the script goes on.

    Raises:
        UsageError: the run directory cannot be used.

    """
    with Guard(_give_up):
        stand_alone()
        launch = read_launch(os.environ)
        agent = RankAgent(launch, config, command, main_script=main_script)
        RankAgent.current = agent
        agent.start()
        if launch.is_alone:
            invite(agent, command, main_script)


def _give_up(error: Exception) -> None:
    if isinstance(error, UsageError) and RankAgent.current is None:
        raise error
    unobserved("observation", error)
    detach_agent()


def attach_agent(options: Mapping[str, Any]) -> None:
    """Start the agent of this process, if there is none.

    Raises:
        RankError: the process that this one was forked from is observed.
        UsageError: an option is wrong, or the run directory cannot be used.

    """
    if RankAgent.current is not None and RankAgent.current.is_inherited:
        raise RankError("this process was forked from one that is observed already")
    if RankAgent.current is not None or _is_importing_main() or is_told():
        return  # what was told of a run joins it later
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    start_agent(
        validated(_flags(options)),
        tuple(sys.argv),
        os.path.join(os.getcwd(), path) if path else None,
    )
    if RankAgent.current is not None:
        guarded(RankAgent.current.exceptions.watch_excepthook, "watching sys.excepthook")


def _is_importing_main() -> bool:
    """Whether a child of multiprocessing imports the script that its parent runs.

    It has the parent's environment, and is no rank for calling what stands in the script's body.
    """
    # Not imported here: it keeps the main module of that moment, which is not the script yet.
    process = sys.modules.get("multiprocessing.process")
    return process is not None and hasattr(process.current_process(), "_inheriting")


def _flags(options: Mapping[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for name, value in options.items():
        if name not in KEYS and name != "config":
            raise UsageError(f"attach() has no option {name!r}")
        if value is None or name == "config":
            flags[name] = value
            continue
        kind = KEYS[name]
        try:
            flags[name] = msgspec.convert(os.fspath(value) if name in _PATHS else value, kind)
        except (msgspec.ValidationError, TypeError) as error:
            one_of = f"one of {', '.join(map(str, get_args(kind)))}"
            wanted = one_of if get_origin(kind) is Literal else str(error)
            raise UsageError(f"attach({name}={value!r}): expected {wanted}") from None
    return flags


def detach_agent() -> None:
    """Stop the agent of this process, if there is one."""
    stand_alone()
    agent, RankAgent.current = RankAgent.current, None
    if agent is not None:
        guarded(agent.stop, "detach()")
