"""The functions that move, remove, link and list: over when they return."""

from __future__ import annotations

import genericpath
import os
import pathlib
import posixpath
from collections.abc import Hashable
from types import FrameType
from typing import Any, Final, NamedTuple

from distdiag.events.files import FileAction
from distdiag.probes.base import AnyCallable, wrap_like
from distdiag.probes.call_sites import caller
from distdiag.probes.files.log import Attempt, FileLog
from distdiag.probes.files.paths import NO_FILES, as_text

# The questions whether a file exists, or how large or old it is.


class Question(NamedTuple):
    """A function that asks for a file; its answer is a bool, or it raises where there is none."""

    owner: Any
    name: str
    api: str
    parameter: str


_GENERIC: Final = ("exists", "isfile", "isdir", "getsize", "getmtime")
_PARAMETERS: Final = {"isdir": "s", "getsize": "filename", "getmtime": "filename"}

QUESTIONS: Final = (
    *(
        Question(genericpath, name, f"os.path.{name}", _PARAMETERS.get(name, "path"))
        for name in _GENERIC
    ),
    Question(posixpath, "lexists", "os.path.lexists", "path"),
)
ACCESS: Final = Question(os, "access", "os.access", "path")
METHODS: Final = tuple(
    Question(pathlib.Path, name, f"Path.{name}", "self") for name in ("exists", "is_file", "is_dir")
)
"""`os.stat` itself is left alone: programs tell it by its identity."""


def asking(original: AnyCallable, row: Question, log: FileLog) -> AnyCallable:
    """Return what comes before the function of this row."""
    run = log.hiding(original) if row.owner is pathlib.Path else original

    @wrap_like(original)
    def call(*args: object, **kwargs: object) -> object:
        if log.probe.off or log.recorder.closed:
            return original(*args, **kwargs)
        try:
            answer = run(*args, **kwargs)
        except OSError:
            _asked(log, row, caller(), args, kwargs, found=False)
            raise
        _asked(log, row, caller(), args, kwargs, found=answer is not False)
        return answer

    return call


def _asked(
    log: FileLog,
    row: Question,
    frame: FrameType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    found: bool,
) -> None:
    with log.guard:
        path = args[0] if args else kwargs.get(row.parameter)
        if type(path) is not str:
            path = as_text(path)
        if path and not path.startswith(NO_FILES) and kwargs.get("dir_fd") is None:
            log.lookups.lookup(path, frame, row.api, found)


# The table of functions, and the probe that wraps them.


class Call(NamedTuple):
    """A function that does something with a path, or makes one path of another.

    `names` are its first parameters: the path, or the origin and the path. `relative` are those
    that give names another meaning. `is_whole`: what it calls in turn is a part of it.
    """

    action: FileAction
    api: str
    names: tuple[str, ...] = ("path",)
    relative: tuple[str, ...] = ("dir_fd",)
    is_whole: bool = False


_BOTH: Final = ("src_dir_fd", "dst_dir_fd")
_TWO_NAMES: Final = ("src", "dst")

CALLS: Final = (
    Call(FileAction.RENAME, "os.rename", _TWO_NAMES, _BOTH),
    Call(FileAction.RENAME, "os.replace", _TWO_NAMES, _BOTH),
    Call(FileAction.LINK, "os.link", _TWO_NAMES, _BOTH),
    Call(FileAction.LINK, "os.symlink", _TWO_NAMES),
    Call(FileAction.REMOVE, "os.remove"),
    Call(FileAction.REMOVE, "os.unlink"),
    Call(FileAction.REMOVE_TREE, "os.rmdir"),
    Call(FileAction.MAKE_DIR, "os.mkdir"),
    Call(FileAction.WRITE, "os.truncate"),
    Call(FileAction.LIST, "os.listdir"),
    Call(FileAction.LIST, "os.scandir"),
)
"""What is made of these (`os.makedirs`, `shutil.move`, `glob`, `pathlib`) is seen through them."""

RMTREE: Final = Call(FileAction.REMOVE_TREE, "shutil.rmtree", is_whole=True)
CONNECT: Final = Call(FileAction.READ, "sqlite3.connect", ("database",), ("uri",))
"""A connection to SQLite is a read for us: its writers exclude one another by themselves."""


def calling(original: AnyCallable, row: Call, log: FileLog) -> AnyCallable:
    """Return what comes before the function of this row."""
    run = log.hiding(original) if row.is_whole else original

    @wrap_like(original)
    def call(*args: object, **kwargs: object) -> object:
        if log.probe.off or log.recorder.closed:
            return original(*args, **kwargs)
        access = None
        with log.guard:
            attempt = _attempt(row, args, kwargs)
            access = None if attempt is None else log.begin(attempt, caller())
            if row.api.startswith("sqlite3"):
                # Its locks would not survive our look at a file that was written before.
                log.open_files.settle()
        if access is None:
            return run(*args, **kwargs)
        return log.carry_out(access, run, (args, kwargs))

    return call


def _attempt(row: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempt | None:
    if any(kwargs.get(name) is not None for name in row.relative):
        return None
    given = [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in enumerate(row.names)
    ]
    if row.action is FileAction.LIST and given == [None]:
        given = ["."]
    paths = [as_text(each) for each in given]
    if None in paths or ":memory:" in paths:
        return None
    *origins, path = [path or "" for path in paths]
    origin = origins[0] if origins else ""
    if row.api == "os.symlink":
        origin = os.path.join(os.path.dirname(path), origin)
    return Attempt(row.action, path, row.api, origin, state=_state(row, path))


def _state(row: Call, path: str) -> Hashable:
    """Tell a folder that has changed: who looks again and again waits for just that."""
    if row.action is not FileAction.LIST:
        return None
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
