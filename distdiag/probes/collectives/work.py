"""What becomes of an asynchronous collective after it was issued.

A `Work` is remembered by weak reference only: the tool never prolongs its life, nor that of the
tensors that it holds.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Final

import torch.distributed as dist

from distdiag.probes.base import AnyCallable, Probe, Wrap, wrap_like
from distdiag.record.event_file import WAITED
from distdiag.record.guard import attempt
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal
from distdiag.record.thread_context import Calls

_WAITS: Final = ("wait", "synchronize")
_LOOKS: Final = (
    "result",
    "exception",
    "is_success",
    "get_future",
    "get_future_result",
    "block_current_stream",
)

_NOTHING: Final[tuple[int, Calls]] = (0, [])


class _Handle(weakref.ref[Any]):
    """A weak reference to a Work and the calls that it stands for."""

    __slots__ = ("calls", "is_completed", "is_observed", "is_waited", "key")

    calls: Calls
    is_completed: bool
    is_observed: bool
    is_waited: bool
    key: int


def _looking_like_it(make: Wrap) -> Wrap:
    return lambda original: wrap_like(original)(make(original))


class WorkProbe(Probe):
    """Records that a Work was waited for, completed, failed, or dropped without a look at it."""

    name: ClassVar[str] = "work"

    def __init__(self, recorder: Recorder, waited: Signal[[]]) -> None:
        """Follow nothing yet; `waited` says that a wait is over."""
        super().__init__(recorder)
        self.waited = waited
        self._handles: dict[int, _Handle] = {}

    def _install(self) -> None:
        kinds: list[Any] = [dist.Work, *dist.Work.__subclasses__()]
        makes: dict[str, Wrap] = {
            **dict.fromkeys(_WAITS, self._waiting),
            **dict.fromkeys(_LOOKS, self._looking),
            "is_completed": self._asking,
        }
        for kind in kinds:
            there = [name for name in makes if callable(vars(kind).get(name))]
            self._patches.wrap_all(kind, {name: _looking_like_it(makes[name]) for name in there})

    def remember(self, work: object, calls: Calls) -> None:
        """Follow the Work that an asynchronous call gave its caller; `calls` are those it made."""
        handle = _Handle(work, self._released)
        handle.key = id(work)
        handle.calls = calls
        handle.is_observed = handle.is_waited = handle.is_completed = False
        self._handles[handle.key] = handle

    def _released(self, handle: _Handle) -> None:
        if self._handles.get(handle.key) is handle:
            del self._handles[handle.key]
        if not handle.is_observed and not self.is_off:
            # What torch or a framework drops is its own affair.
            self._write([call for call in handle.calls if call[1]], "dropped")

    def _write(self, calls: Calls, state: str) -> None:
        with self.guard:
            for call, _ in calls:
                self.recorder.state(call, state)

    def _look(self, work: object) -> _Handle | None:
        handle = None if self.is_off else self._handles.get(id(work))
        if handle is not None:
            handle.is_observed = True
        return handle

    def _waiting(self, original: AnyCallable) -> AnyCallable:
        here, recorder = self.recorder.here, self.recorder
        mark_waited, fail, waited = self._mark_waited, self.fail, self.waited

        def method(self_: object, *args: object, **kwargs: object) -> object:
            if self.off or recorder.closed:
                return original(self_, *args, **kwargs)
            context = here.context
            key, calls = context.awaited
            is_awaited = key == id(self_)
            if is_awaited:
                context.awaited = _NOTHING
            else:
                calls = self._calls_to_wait_for(self_)
            if not calls:
                return original(self_, *args, **kwargs)
            try:
                result = original(self_, *args, **kwargs)
            except BaseException:
                self._write(calls, "failed")
                raise
            if is_awaited:
                attempt(fail, mark_waited, calls)
            else:
                self._write(calls, "waited")
            waited.emit()
            return result

        return method

    def _calls_to_wait_for(self, work: object) -> Calls:
        handle = self._look(work)
        if handle is None or handle.is_waited:
            return []
        handle.is_waited = True
        return handle.calls

    def _mark_waited(self, calls: Calls) -> None:
        for call, _ in calls:
            self.recorder.mark(call, WAITED)

    def _looking(self, original: AnyCallable) -> AnyCallable:
        def method(self_: object, *args: object, **kwargs: object) -> object:
            self._look(self_)
            return original(self_, *args, **kwargs)

        return method

    def _asking(self, original: AnyCallable) -> AnyCallable:
        def method(self_: object, *args: object, **kwargs: object) -> object:
            handle = self._look(self_)
            result = original(self_, *args, **kwargs)
            if handle is not None and result and not handle.is_completed:
                handle.is_completed = True
                self._write(handle.calls, "completed")
            return result

        return method
