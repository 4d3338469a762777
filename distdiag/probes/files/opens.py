"""The functions of Python that open files."""

from __future__ import annotations

import os
import stat
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple

from distdiag.events.files import FileAction
from distdiag.probes.base import AnyCallable
from distdiag.probes.call_sites import caller
from distdiag.probes.files.log import Access, Attempt, FileLog
from distdiag.probes.files.open_files import descriptor_is_open, file_is_open, or_mapped
from distdiag.probes.files.paths import NO_FILES, as_text
from distdiag.probes.untyped import Untyped

_READ: Final = FileAction.READ
_READING: Final = frozenset({"r", "rb", "rt"})

_OPENER: Final = 7
"""The place of the opener among the arguments of `open`."""

# Looked up here once: it is called for every file.

_NO_CONTENT: Final = os.O_DIRECTORY | os.O_PATH | os.O_TMPFILE


class Mode(NamedTuple):
    """What a file is opened for."""

    action: FileAction
    is_exclusive: bool = False
    may_map: bool = False


def mode_of(text: str) -> Mode:
    """Read a mode of `open`, such as ``"rb+"``."""
    is_exclusive, may_map = "x" in text, "+" in text
    if "a" in text:
        return Mode(FileAction.APPEND, may_map=may_map)
    if is_exclusive or may_map or "w" in text:
        return Mode(FileAction.WRITE, is_exclusive, may_map)
    return Mode(_READ)


def mode_of_flags(flags: int) -> Mode | None:
    """Read the flags of `os.open`; None if no content is opened."""
    if flags & _NO_CONTENT:
        return None
    access = flags & os.O_ACCMODE
    is_exclusive = bool(flags & os.O_CREAT and flags & os.O_EXCL)
    if access == os.O_RDONLY and not is_exclusive:  # who creates a file writes, if only its name
        return Mode(_READ)
    action = FileAction.APPEND if flags & os.O_APPEND else FileAction.WRITE
    return Mode(action, is_exclusive, may_map=access == os.O_RDWR)


def opening(original: AnyCallable, log: FileLog) -> AnyCallable:
    """Return what comes before `open`."""
    probe, recorder, lookup, guard = log.probe, log.recorder, log.lookups.lookup, log.guard

    def call(*args: Untyped, **kwargs: Untyped) -> Untyped:
        if probe.off or recorder.closed:
            return original(*args, **kwargs)
        access = seq = path = None
        with guard:
            path = args[0] if args else kwargs.get("file")
            text = args[1] if len(args) > 1 else kwargs.get("mode", "r")
            if type(path) is not str:
                path = as_text(path)
            # What an opener does with the name is its own affair; it is seen when it does it.
            is_plain = len(args) <= _OPENER and "opener" not in kwargs and type(text) is str
            if not is_plain or not path or path.startswith(NO_FILES):
                pass
            elif text in _READING and not log.has_failed:
                seq = lookup(path, caller(), "open", None)
            else:
                access = _begin(log, path, mode_of(text), "open", caller())
        if access is not None:
            return _carry_out(log, access, original, args, kwargs)
        if seq is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            with guard:
                log.lookup_failed(seq, str(path), caller(), error)
            raise

    return call


def opening_descriptor(original: AnyCallable, log: FileLog) -> AnyCallable:
    """Return what comes before `os.open`."""
    probe, recorder = log.probe, log.recorder

    def call(*args: object, **kwargs: object) -> Untyped:
        if probe.off or recorder.closed:
            return original(*args, **kwargs)
        access = None
        with log.guard:
            given = args[0] if args else kwargs.get("path")
            flags = args[1] if len(args) > 1 else kwargs.get("flags")
            mode = mode_of_flags(flags) if isinstance(flags, int) else None
            if mode is not None and kwargs.get("dir_fd") is None:
                access = _begin(log, given, mode, "os.open", caller())
        if access is None:
            return original(*args, **kwargs)
        return _carry_out(log, access, original, args, kwargs)

    return call


def _begin(log: FileLog, given: object, mode: Mode, api: str, frame: FrameType) -> Access | None:
    path = given if type(given) is str else as_text(given)
    if not path or path.startswith(NO_FILES):
        return None
    has_end = mode.action is not _READ
    attempt = Attempt(
        mode.action, path, api, "", mode.is_exclusive, has_end, state=mode.may_map or None
    )
    return log.begin(attempt, frame)


def _carry_out(
    log: FileLog,
    access: Access,
    original: AnyCallable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    then = None if access.key[0].action is _READ else partial(_opened, log)
    return log.carry_out(access, original, (args, kwargs), then)


def _opened(log: FileLog, access: Access, opened: Untyped) -> None:
    if isinstance(opened, int):
        descriptor, is_open = opened, descriptor_is_open(opened)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    else:
        descriptor, is_open = opened.fileno(), file_is_open(opened)
        is_file = opened.seekable()
    if not is_file:
        log.ended(access)  # a pipe or a terminal: nothing stays of what is written
        return
    attempt = access.key[0]
    if attempt.state:
        is_open = or_mapped(is_open, descriptor)
    log.opened(access, is_open, has_content=attempt.action is FileAction.WRITE)
