"""Lets the processes that a program starts know of the run, by what they inherit.

Python runs the module `sitecustomize` when it starts. The environment of each new process gets our
folder with one first on its PYTHONPATH. The program's own environment stays as it is: what it
passes on is changed where a process is made.
"""

import _posixsubprocess
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from distdiag.probes.base import AnyCallable, Patches
from distdiag.record.guard import attempt, warn

VARIABLE: Final = "DISTDIAG_JOIN"
"""Holds the run directory. A process that has it and is none of ours says so by an empty value."""
_FOLDER: Final = str(Path(__file__).parent / "startup")
_HOME: Final = str(Path(__file__).parents[2])
_ENVIRONMENT: Final = 5
"""The place of the environment among the arguments of `fork_exec`, in Python 3.11 to 3.14."""


def search_path(before: str) -> str:
    """Return a PYTHONPATH on which this package is found wherever we found it."""
    paths = [path for path in before.split(os.pathsep) if path]
    if _HOME not in paths and not _HOME.endswith(("site-packages", "dist-packages")):
        paths.append(_HOME)
    return os.pathsep.join(paths)


def told_of(run: Path, environ: dict[str, str]) -> dict[str, str]:
    """Return this environment as a process gets it that may join the run."""
    if VARIABLE in environ:
        return environ
    path = search_path(environ.get("PYTHONPATH", ""))
    joined = os.pathsep.join(filter(None, (_FOLDER, path)))
    return {**environ, VARIABLE: str(run), "PYTHONPATH": joined}


def forget() -> None:
    """Let what this process starts from now on know nothing of the run."""
    if os.environ.pop(VARIABLE, None) is None:
        return
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    left = os.pathsep.join(path for path in paths if path != _FOLDER)
    if left:
        os.environ["PYTHONPATH"] = left
    else:
        os.environ.pop("PYTHONPATH", None)


class Children:
    """Tells the processes that `subprocess` and `multiprocessing` start of the run."""

    def __init__(self, run: Path) -> None:
        """Tell nobody yet."""
        self._run = run
        self._patches = Patches(lambda what, why: warn(f"{what} cannot be watched: {why}"))

    def start(self) -> None:
        """Begin to tell them."""
        self._patches.wrap(_posixsubprocess, "fork_exec", self._telling)

    def stop(self) -> None:
        """Tell nobody any more."""
        self._patches.undo()

    def _telling(self, original: AnyCallable) -> AnyCallable:
        def fork_exec(*args: object) -> object:
            told = attempt(lambda _: None, self._with_environment, args)
            return original(*(told or args))

        return fork_exec

    def _with_environment(self, args: Sequence[object]) -> Sequence[object]:
        given = args[_ENVIRONMENT]
        if given is None:
            environ = dict(os.environ)
        elif isinstance(given, Sequence):
            pairs = (os.fsdecode(each).split("=", 1) for each in given)
            environ = {name: value for name, value in pairs}
        else:
            return args
        told = [os.fsencode(f"{k}={v}") for k, v in told_of(self._run, environ).items()]
        return (*args[:_ENVIRONMENT], told, *args[_ENVIRONMENT + 1 :])


def is_told() -> bool:
    """Whether this process was started by a program that is checked."""
    return bool(os.environ.get(VARIABLE))
