"""The Python methods of a process group: where nearly all collectives of Python code come by.

The functions of `torch.distributed` stay as they are: Dynamo recognises them by identity, and
users have imported them by name. All of them end in these methods.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from distdiag.probes.base import AnyCallable, Probe, Wrap, wrap_like
from distdiag.probes.collectives.operators import (
    METHODS,
    Method,
    bind,
    flatten,
    options_of,
    reduce_op_of,
    whole_numbers,
)
from distdiag.probes.collectives.tap import Recorded, Tap, TapError
from distdiag.probes.collectives.work import Sent, WorkProbe, sent_by
from distdiag.probes.out_of_sight import reading_attributes
from distdiag.record.event_file import ISSUED, WAITED
from distdiag.record.guard import attempt
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal
from distdiag.record.thread_context import Calls, ThreadContext

_Work: Final = dist.Work
_SHARING: Final = frozenset({"allreduce", "broadcast", "allreduce_coalesced", "reduce"})
_EXCHANGES: Final = frozenset(
    name
    for name, method in METHODS.items()
    if method.public.startswith(("all_", "reduce_scatter", "send"))
)
_NATIVE_CALLERS: Final = ("_broadcast_coalesced", "_verify_params_across_processes")


class CollectiveWrappers(Probe):
    """Lets the tap write each call down, and tells the work probe which Work came back.

    What goes on to collectives in C++ (the reducer of DDP and its helpers) does not come by here:
    the tap is notified before they begin.
    """

    name: ClassVar[str] = "collective-wrappers"

    def __init__(
        self,
        recorder: Recorder,
        tap: Tap,
        works: WorkProbe,
        shared: Signal[Any, Any, str],
        exchanging: Signal[str, Sequence[torch.Tensor], Any, int, FrameType],
    ) -> None:
        """Hand each call to `tap` and each Work to `works`; tell others by the signals."""
        super().__init__(recorder)
        self._shared = shared
        self._exchanging = exchanging
        self._tap = tap
        self._works = works

    def _install(self) -> None:
        kind = dist.ProcessGroup
        makes: dict[str, Wrap] = {
            name: partial(self._wrapper, method=method)
            for name, method in METHODS.items()
            if name in vars(kind)
        }
        if "_start_coalescing" in vars(kind) and "_end_coalescing" in vars(kind):
            makes["_start_coalescing"] = self._call_before(self._start_coalescing)
            makes["_end_coalescing"] = self._end_wrapper
        self._need(self._patches.wrap_all(kind, makes))
        self._watch_native_callers()

    def _need(self, is_wrapped: bool) -> None:
        """Go on only if all that is there is seen: a call without a number shifts later ones."""
        if not is_wrapped:
            raise TapError("a method of process groups cannot be observed")

    def _wrapper(self, original: AnyCallable, method: Method) -> AnyCallable:
        # Looked up here once: each attribute costs in a place where microseconds count.
        here, recorder, tap = self.recorder.here, self.recorder, self._tap
        record, frame, returned, fail = tap.record, sys._getframe, self._issued, tap.fail
        shared, exchanging = self._shared, self._exchanging
        may_share = original.__name__ in _SHARING
        may_exchange = original.__name__ in _EXCHANGES

        @wrap_like(original)
        def wrapper(self_: object, *args: object, **kwargs: object) -> object:
            if self.off or tap.off or recorder.closed:
                return original(self_, *args, **kwargs)
            context, given = here.context, args
            with reading_attributes():
                if kwargs:
                    given = attempt(fail, bind, method, args, kwargs) or ()
                made = attempt(fail, record, context, method, self_, given, frame(1))
            if made is None:
                return original(self_, *args, **kwargs)
            if may_share:
                reduce_op = reduce_op_of(method, given, options_of(given)) if method.reduces else ""
                for tell in shared.subscribers:
                    tell(args[0] if args else None, self_, reduce_op)
            if may_exchange and exchanging.subscribers:
                self._exchange(method, given, self_, frame(1))
            context.is_recorded = True
            try:
                work = original(self_, *args, **kwargs)
            except BaseException:
                tap.failed(made[0])
                raise
            finally:
                context.is_recorded = False
            attempt(fail, returned, context, work, made, method, given)
            return work

        return wrapper

    def _exchange(
        self, method: Method, given: tuple[Any, ...], group: object, frame: FrameType
    ) -> None:
        peer = given[1] if method.is_message else -1
        name = "uneven" if method.has_splits and _is_uneven(given) else method.public
        self._exchanging.emit(name, flatten(given[method.input]), group, peer, frame)

    def _issued(
        self,
        context: ThreadContext,
        work: object,
        made: Recorded,
        method: Method,
        given: tuple[Any, ...],
    ) -> None:
        self.recorder.mark(made[0], ISSUED)
        call, is_own, is_async = made
        is_watched = is_own and is_async and method.input >= 0
        sent = sent_by(flatten(given[method.input])) if is_watched else []
        self._returned(context, work, [(call, is_own)], is_async, sent)

    def _returned(
        self,
        context: ThreadContext,
        work: object,
        calls: Calls,
        is_async: bool,
        sent: list[Sent],
    ) -> None:
        if context.coalesced is not None:
            context.coalesced += calls
        elif isinstance(work, _Work):
            if is_async:
                self._works.remember(work, calls, sent)
            else:
                # The caller itself will wait for this Work now; nobody else gets it.
                context.awaited = (id(work), calls)
        elif not is_async:
            for call, _ in calls:  # the backend waits by itself and returns nothing
                self.recorder.mark(call, WAITED)
            self._works.over()

    def _start_coalescing(self, *_: object, **__: object) -> None:
        self.recorder.here.context.coalesced = []

    def _end_wrapper(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def method(self_: object, *args: object, **kwargs: object) -> object:
            context = self.recorder.here.context
            calls, context.coalesced = context.coalesced, None
            work = original(self_, *args, **kwargs)
            if calls and not self.is_off:
                # Whether its user wants to wait is not known here: never counted as dropped.
                with self.guard:
                    self._returned(context, work, calls, is_async=False, sent=[])
            return work

        return method

    # What calls collectives from C++

    def _watch_native_callers(self) -> None:
        bindings: Any = torch._C._distributed_c10d
        names = [name for name in _NATIVE_CALLERS if name in vars(bindings)]
        are_seen = self._patches.wrap_all(bindings, dict.fromkeys(names, self._engaging))
        reducer = getattr(bindings, "Reducer", None)
        are_seen &= reducer is None or self._patches.wrap(reducer, "__init__", self._engaging)
        if not are_seen:
            self._tap.engage()  # from the beginning: when they begin is not seen

    def _engaging(self, original: AnyCallable) -> AnyCallable:
        tap = self._tap

        @wrap_like(original)
        def function(*args: object, **kwargs: object) -> object:
            tap.engage()
            return original(*args, **kwargs)

        return function


def _is_uneven(given: tuple[Any, ...]) -> bool:
    """Say whether an all-to-all has parts of unlike sizes."""
    return len({*whole_numbers(given[2]), *whole_numbers(given[3])}) > 1
