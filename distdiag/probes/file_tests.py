"""The questions whether a file exists, or how large or old it is."""

from __future__ import annotations

import genericpath
import os
import pathlib
import posixpath
from types import FrameType
from typing import Any, Final, NamedTuple

from distdiag.probes.base import AnyCallable, wrap_like
from distdiag.probes.file_log import FileLog
from distdiag.probes.file_paths import NO_FILES, as_text
from distdiag.probes.stack import caller


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

    @wrap_like(original)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return _ask(log, row, caller(), original, args, kwargs)

    return call


def _ask(
    log: FileLog,
    row: Question,
    frame: FrameType,
    original: AnyCallable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    if log.probe.off or log.recorder.closed:
        return original(*args, **kwargs)
    run = log.hiding(original) if row.owner is pathlib.Path else original
    try:
        answer = run(*args, **kwargs)
    except OSError:
        _asked(log, row, frame, args, kwargs, found=False)
        raise
    _asked(log, row, frame, args, kwargs, found=answer is not False)
    return answer


def _asked(
    log: FileLog,
    row: Question,
    frame: FrameType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    found: bool,
) -> None:
    try:
        path = args[0] if args else kwargs.get(row.parameter)
        if type(path) is not str:
            path = as_text(path)
        if path and not path.startswith(NO_FILES) and kwargs.get("dir_fd") is None:
            log.looks.look(path, frame, row.api, found)
    except Exception as error:  # noqa: BLE001 (our part must not break the user's)
        log.probe.fail(error)
