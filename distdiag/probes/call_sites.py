"""Call sites: the Python stack as a cheap key, and as frames when it is new."""

import os
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from distdiag.events.base import CallSite, Frame
from distdiag.record.recorder import Recorder, Site
from distdiag.record.thread_context import ThreadContext
from distdiag.record.user_code import is_user_file

MAX_FRAMES: Final = 200

_OWN_FOLDER: Final = str(Path(__file__).parents[1]) + os.sep
_DEMO_FOLDER: Final = _OWN_FOLDER + "demo" + os.sep
_RUNPY: Final = "<frozen runpy>"

# The files of torch whose functions are the public ways to ask for a collective.
_API_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/device_mesh.py",
)
_PASSING_ON: Final = frozenset({"__torch_dispatch__", "__torch_function__"})
"""By these modes and subclasses of the program hand on what other code calls."""
_WRAPPER_FILES: Final = ("torch/distributed/c10d_logger.py",)


def caller(depth: int = 1) -> FrameType:
    """Return the frame that called whoever asks (1), or that one's caller (2).

    Where C called it, such as the interpreter at its end (`atexit.register(os.remove, path)`),
    there is none: the outermost one stands for it.
    """
    while True:
        try:
            return sys._getframe(depth + 1)
        except ValueError:
            depth -= 1


def stack_key(frame: FrameType | None) -> tuple[int, ...]:
    """Return what tells this stack from others: the place of every frame in its code.

    The bytecode is a part of the code object, so address plus offset is one number that no other
    living code object can have. (Hashing a code object would hash all of its parts.)
    """
    key: list[int] = []
    append = key.append
    while frame is not None:
        append(id(frame.f_code) + frame.f_lasti)
        frame = frame.f_back
    return tuple(key)


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(frame: FrameType | None, main_script: str | None) -> tuple[Frame, ...]:
    """Return the stack, innermost first, without the frames of distdiag and what started it."""
    stack = list(_walk(frame))
    while stack and _is_starter(stack[-1].f_code.co_filename, main_script):
        stack.pop()
    return tuple(
        Frame(
            item.f_code.co_filename,
            item.f_lineno or item.f_code.co_firstlineno,
            item.f_code.co_name,
            item.f_code.co_name not in _PASSING_ON
            and is_user_file(item.f_code.co_filename, main_script),
        )
        for item in stack
        if not is_own_file(item.f_code.co_filename, main_script)
    )[:MAX_FRAMES]


def is_own_file(path: str, main_script: str | None = None) -> bool:
    """Whether a file is part of distdiag (its demos are written as users write)."""
    if not path.startswith(_OWN_FOLDER):
        return False
    return path != main_script and not path.startswith(_DEMO_FOLDER)


def _is_starter(path: str, main_script: str | None) -> bool:
    return path == _RUNPY or is_own_file(path, main_script)


def api_of(frames: tuple[Frame, ...]) -> tuple[str | None, bool]:
    """Return the public torch function on top of this stack, and whether the user called it."""
    api: str | None = None
    for frame in frames:
        if frame.file.endswith(_API_FILES):
            api = frame.function
        elif not frame.file.endswith(_WRAPPER_FILES) and not frame.file.endswith("contextlib.py"):
            return api, frame.user
    return api, False


def find_site(recorder: Recorder, context: ThreadContext, frame: FrameType | None) -> Site:
    """Return the call site of this frame, written down if it is new.

    A thread of C++ (the autograd engine) works for the backward pass that runs: its stack goes on
    with that of the thread that called backward.
    """
    key: Hashable = stack_key(frame)
    module = context.module
    backward = recorder.backward if context.is_native else None
    if backward is not None:
        key = (key, backward[0])
    if module is not None:
        key = (key, module)
    known = recorder.tables.sites.get(key)
    if known is not None:
        return known
    frames = frames_of(frame, recorder.main_script)
    if backward is not None:
        frames = (frames + backward[1])[:MAX_FRAMES]
    api, is_own_call = api_of(frames)
    return recorder.define_site(
        key,
        CallSite(frames, module),
        api=api,
        is_own_call=is_own_call,
        kept_alive=[item.f_code for item in _walk(frame)],
    )


def site_here(recorder: Recorder, frame: FrameType | None) -> CallSite:
    """Return a call site to be written with a rare event, with all its frames."""
    return CallSite(frames_of(frame, recorder.main_script), recorder.here.context.module)
