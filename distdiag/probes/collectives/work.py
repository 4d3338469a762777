"""What becomes of an asynchronous collective after it was issued.

A `Work` is remembered by weak reference only: the tool never prolongs its life, nor that of the
tensors that it holds.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist

from distdiag.events.collectives import BufferChanged
from distdiag.probes.base import AnyCallable, Probe, Wrap, wrap_like
from distdiag.probes.call_sites import site_here
from distdiag.probes.out_of_sight import reading_attributes
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


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class Sent(NamedTuple):
    """A tensor that a call reads while it is under way, and its version when the call began."""

    tensor: weakref.ref[torch.Tensor]
    version: int


def sent_by(tensors: Iterable[torch.Tensor]) -> list[Sent]:
    """Return those of the tensors of which it can be told whether the program changes them.

    A view shares its version with all of its storage, the rest of which may be changed.
    """
    with reading_attributes():
        return [
            Sent(weakref.ref(each), each._version)
            for each in tensors
            if type(each) in _PLAIN
            and each.layout is torch.strided
            and not each.is_inference()
            and each.nbytes == each.untyped_storage().nbytes()
        ]


class _Handle(weakref.ref[Any]):
    """A weak reference to a Work and the calls that it stands for."""

    __slots__ = (
        "calls",
        "is_completed",
        "is_observed",
        "is_waited",
        "key",
        "num_waits",
        "sent",
    )

    num_waits: int
    sent: list[Sent]
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
        self._num_waits = 0
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

    def remember(self, work: object, calls: Calls, sent: list[Sent]) -> None:
        """Follow the Work that an asynchronous call gave its caller; `calls` are those it made."""
        handle = _Handle(work, self._released)
        handle.key = id(work)
        handle.sent = sent
        handle.num_waits = self._num_waits
        handle.calls = calls
        handle.is_observed = handle.is_waited = handle.is_completed = False
        self._handles[handle.key] = handle

    def over(self) -> None:
        """Notify whom it concerns that the program has waited for a call."""
        self._num_waits += 1
        self.waited.emit()

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
        mark_waited, fail, over = self._mark_waited, self.fail, self.over

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
            over()
            return result

        return method

    def _calls_to_wait_for(self, work: object) -> Calls:
        handle = None if self.is_off else self._handles.get(id(work))
        if handle is None or handle.is_waited:
            return []
        # What the program waited or asked for since may have told it that the call was over.
        if handle.sent and not handle.is_observed and handle.num_waits == self._num_waits:
            with self.guard:
                self._compare(handle)
        handle.is_observed = handle.is_waited = True
        return handle.calls

    def _compare(self, handle: _Handle) -> None:
        """Write down that what a call sends was changed since the call began."""
        for each in handle.sent:
            tensor = each.tensor()
            if tensor is None:
                continue
            with reading_attributes():
                version, device = tensor._version, tensor.device.type
            if version > each.version:
                self.recorder.event(
                    BufferChanged,
                    call=handle.calls[0][0],
                    num_changes=version - each.version,
                    device=device,
                    site=site_here(self.recorder, sys._getframe(3)),
                )
                return

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
