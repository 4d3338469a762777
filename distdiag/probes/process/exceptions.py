"""Exceptions that nobody caught, and signal handlers of the script that ran."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import ClassVar, Final

from distdiag.events.base import Frame
from distdiag.events.lifecycle import Raised, Signalled
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of, is_own_file
from distdiag.record.exception_text import message_of, plain, shortened, traceback_of
from distdiag.record.recorder import Recorder
from distdiag.record.status_page import RAISED
from distdiag.record.user_code import is_user_file

LONGEST_MESSAGE: Final = 4_000
LONGEST_TRACEBACK: Final = 60_000
"""More than a RecursionError or fifteen exceptions of a group need; an event must stay small."""

_Kind = type[BaseException]

_FORWARDS: Final = frozenset({"_call_impl", "_wrapped_call_impl"})
"""The functions of `torch.nn.Module` that run hooks around the forward pass."""


def strip_own_frames(
    trace: TracebackType | None, main_script: str | None = None
) -> TracebackType | None:
    """Return a traceback without the frames of distdiag and of what started it.

    `tb_next` is changed in place: what Python prints later is what it would print without us.
    """
    kept: list[TracebackType] = []
    seen_user = False
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not is_own_file(path, main_script) and (seen_user or path != "<frozen runpy>"):
            kept.append(trace)
            seen_user = True
        trace = trace.tb_next
    if not kept:
        return None  # a syntax error of the script itself: no frame of it has run
    for here, following in zip(kept, [*kept[1:], None], strict=True):
        here.tb_next = following
    return kept[0]


class ExceptionProbe(Probe):
    """Records what ends the rank or one of its threads."""

    name: ClassVar[str] = "exceptions"

    def __init__(self, recorder: Recorder, *, after_raise: Callable[[], None]) -> None:
        """Call `after_raise` when the traceback of the main thread has been printed."""
        super().__init__(recorder)
        self._after_raise = after_raise

    def _install(self) -> None:
        self._patches.wrap(threading, "excepthook", self._thread_hook)
        self._patches.wrap(signal, "signal", self._signal_wrapper)
        self._patches.wrap(signal, "getsignal", self._getting)

    def watch_excepthook(self) -> None:
        """See the exceptions that reach Python's own hook (where the script is not run by us)."""
        hook = sys.excepthook

        def excepthook(kind: _Kind, value: BaseException, trace: TracebackType | None) -> None:
            self.raised(value, trace)
            hook(kind, value, trace)
            self._after_raise()

        self._patches.replace(sys, "excepthook", excepthook)

    def raised(
        self, error: BaseException, trace: TracebackType | None, thread: str = "MainThread"
    ) -> None:
        """Record an exception that nobody caught."""
        if self.is_off:
            return
        with self.guard:
            main_script = self.recorder.main_script
            trace = strip_own_frames(trace, main_script)
            self.recorder.event(
                Raised,
                type=plain(_type_name(type(error))),
                message=shortened(message_of(error), LONGEST_MESSAGE),
                frames=_frames(trace, main_script),
                traceback=traceback_of(error, trace, LONGEST_TRACEBACK),
                thread=thread,
                unhooked=_unhooked(trace),
            )
            if thread == "MainThread":
                self.recorder.raise_flag(RAISED)

    def read_exit(self, error: SystemExit) -> tuple[tuple[Frame, ...], str]:
        """Return where the script asked to end, innermost frame first, and the reason it gave."""
        if self.is_off:
            return (), ""
        with self.guard:
            main_script = self.recorder.main_script
            frames = _frames(error.__traceback__, main_script)
            kept = tuple(frame for frame in frames if not is_own_file(frame.file, main_script))
            reason = plain(error.code) if isinstance(error.code, str) else ""
            return kept, shortened(reason, LONGEST_MESSAGE)
        return (), ""

    def _thread_hook(self, original: AnyCallable) -> AnyCallable:
        def excepthook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
                name = "unknown" if args.thread is None else args.thread.name
                self.raised(args.exc_value, args.exc_traceback, name)
            original(args)

        return excepthook

    def _signal_wrapper(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def set_handler(signalnum: int, handler: object) -> object:
            ours = self._handler(handler) if callable(handler) and not self.is_off else handler
            return _original(original(signalnum, ours))

        return set_handler

    def _getting(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def get_handler(signalnum: int) -> object:
            return _original(original(signalnum))

        return get_handler

    def _handler(self, handler: AnyCallable) -> AnyCallable:
        if handler is signal.default_int_handler or hasattr(handler, "distdiag_original"):
            return handler

        # Its name is `SIGNAL_FRAME`.
        def run_users_signal_handler(signalnum: int, frame: FrameType | None) -> object:
            if not self.is_off:
                with self.guard:
                    frames = frames_of(frame, self.recorder.main_script)
                    self.recorder.event(Signalled, signal=int(signalnum), frames=frames)
            with _in_sight():
                return handler(signalnum, frame)

        run_users_signal_handler.distdiag_original = handler  # type: ignore[attr-defined]
        return run_users_signal_handler


def _unhooked(trace: TracebackType | None) -> str:
    """Return the method of a model that FSDP2 keeps that was called instead of its forward pass.

    Only if the innermost module has its parameters as shards: where FSDP2 was told of the method
    they are whole there.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    modules = sys.modules.get("torch.nn")
    if kind is None or modules is None:
        return ""
    method, innermost = "", None
    for frame, _ in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            if frame.f_code.co_name in _FORWARDS:
                return ""
            method = method or f"{type(owner).__name__.removeprefix('FSDP')}.{frame.f_code.co_name}"
        innermost = owner if isinstance(owner, modules.Module) else innermost
    own = vars(innermost).get("_parameters", {}) if innermost is not None else {}
    return method if any(hasattr(each, "placements") for each in own.values()) else ""


def _in_sight() -> AbstractContextManager[None]:
    """Let a handler run as if it had not interrupted a part of ours that is out of sight."""
    hiding = sys.modules.get("distdiag.probes.out_of_sight")
    return nullcontext() if hiding is None else hiding.in_sight()


def _original(handler: object) -> object:
    return getattr(handler, "distdiag_original", handler)


def _type_name(kind: _Kind) -> str:
    # A metaclass may say what it likes of these: only `type` itself knows.
    name, qualname, module = (
        str(type.__dict__[key].__get__(kind)) for key in ("__name__", "__qualname__", "__module__")
    )
    return qualname if module in ("builtins", "__main__") else f"{module}.{name}"


def _frames(trace: TracebackType | None, main_script: str | None) -> tuple[Frame, ...]:
    frames = [
        Frame(
            summary.f_code.co_filename,
            line,
            summary.f_code.co_name,
            is_user_file(summary.f_code.co_filename, main_script),
        )
        for summary, line in traceback.walk_tb(trace)
    ]
    return tuple(reversed(frames))
