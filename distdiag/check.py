"""Run a script under observation: ``torchrun … -m distdiag.check [options] train.py [args]``.

The script sees what it would see as ``python train.py``: its arguments, its folder first on the
path, itself as ``__main__``, its own exit status, and tracebacks that show only its own frames.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple, NoReturn

import click

from distdiag.agent import RankAgent, guarded
from distdiag.config import Config, load_config
from distdiag.errors import UsageError
from distdiag.options import check_options
from distdiag.probes.exceptions import strip_own_frames
from distdiag.run_dir import Launch, read_launch

_USAGE: Final = 2
_PEER_DELAY_S: Final = 0.5
"""Local rank 0 says what is wrong; the others wait, so that the launcher does
not kill it before."""


class Program(NamedTuple):
    """What to run as ``__main__``. `is_main_file` is false for ``-m package.module``."""

    code: Callable[[], CodeType]
    attributes: dict[str, Any]
    argv: list[str]
    path: str
    first_on_path: str


def _find_script(script: str, args: Sequence[str]) -> Program:
    path = os.path.abspath(script)
    if not os.path.exists(path):
        raise UsageError(f"script {script!r} does not exist")
    if not os.path.isfile(path):
        raise UsageError(f"script {script!r} is not a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {script!r} cannot be read")
    loader = SourceFileLoader("__main__", path)
    # As Python does: the folder of the file itself, if the script is a link to it.
    folder = os.path.dirname(os.path.abspath(os.path.realpath(path)))
    return Program(
        # Compiled when the script begins, so that a syntax error is the script's own.
        code=lambda: compile(Path(path).read_bytes(), path, "exec", dont_inherit=True),
        attributes={"__file__": path, "__loader__": loader, "__spec__": None, "__package__": None},
        argv=[script, *args],
        path=path,
        first_on_path=folder,
    )


def _find_module(name: str, args: Sequence[str]) -> Program:
    cwd = os.getcwd()
    if not sys.flags.safe_path:
        sys.path[0] = cwd
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(f"module {name!r} cannot be found: {error}") from None
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        raise UsageError(f"module {name!r} does not exist or cannot be run")
    loader, found = spec.loader, spec
    attributes = {
        "__file__": spec.origin,
        "__loader__": loader,
        "__spec__": spec,
        "__package__": spec.parent,
    }
    return Program(
        code=lambda: loader.get_code(found.name) or compile("", spec.origin or "", "exec"),
        attributes=attributes,
        argv=[spec.origin, *args],
        path=spec.origin,
        first_on_path=cwd,
    )


def _run_as_main(program: Program) -> None:
    """Run the program in a fresh ``__main__``, as the interpreter would."""
    module = ModuleType("__main__")
    module.__dict__.update(
        program.attributes, __builtins__=builtins, __cached__=None, __annotations__={}
    )
    sys.modules["__main__"] = module
    sys.argv = program.argv
    if not sys.flags.safe_path:
        sys.path[0] = program.first_on_path
    exec(program.code(), module.__dict__)


def _exit_status(code: object) -> int:
    """Return the status that Python ends with for ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _observe(program: Program, agent: RankAgent | None) -> None:
    """Run the program and tell the agent how it ended."""
    try:
        _run_as_main(program)
    except SystemExit as error:
        if agent is not None:
            agent.will_exit(_exit_status(error.code), error)
        raise
    except BaseException as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if agent is not None:
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


def _start_agent(launch: Launch, config: Config, program: Program) -> RankAgent | None:
    try:
        agent = RankAgent(launch, config, tuple(program.argv), main_script=program.path)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 (said to the user, and the script goes on)
        reason = error

        def fail() -> None:
            raise reason

        guarded(fail, "observation")
        return None
    RankAgent.current = agent
    guarded(agent.start, "observation")
    return agent


def _validated(flags: Mapping[str, Any]) -> Config:
    config = load_config(flags)
    default = Config()
    if (config.select, config.ignore) != (default.select, default.ignore):
        from distdiag.checks import load_checks
        from distdiag.reports import reporter_names

        config.validate(codes=load_checks(), reporters=reporter_names())
    elif config.report != default.report:
        from distdiag.reports import reporter_names

        config.validate(codes=(), reporters=reporter_names())
    return config


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@check_options
@click.option("-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def _command(script: str, args: tuple[str, ...], is_module: bool, **flags: Any) -> Program:  # noqa: ANN401
    """Run SCRIPT with ARGS under observation; put torchrun or another launcher in front."""
    program = _find_module(script, args) if is_module else _find_script(script, args)
    launch = read_launch(os.environ)
    agent = _start_agent(launch, _validated(flags), program)
    click.get_current_context().obj = agent
    return program


def _refuse(message: str, launch: Launch) -> NoReturn:
    if launch.local_rank == 0:
        sys.stderr.write(f"distdiag: {message}\n")
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(_USAGE))
        time.sleep(_PEER_DELAY_S)
    raise SystemExit(_USAGE)


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, start the agent, and run the script as ``__main__``."""
    launch = read_launch(os.environ)
    try:
        program = _command.main(
            args=list(arguments), prog_name="python -m distdiag.check", standalone_mode=False
        )
    except click.ClickException as error:
        _refuse(error.format_message(), launch)
    except UsageError as error:
        _refuse(str(error), launch)
    if not isinstance(program, Program):
        return  # --help was asked for, and shown
    _observe(program, RankAgent.current)


if __name__ == "__main__":
    main(sys.argv[1:])
