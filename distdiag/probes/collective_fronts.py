"""The Python methods of a process group: the reduce operator, and the Work that they return.

The functions of `torch.distributed` stay as they are: Dynamo recognises them by identity, and
users have imported them by name. All of them end in these methods.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch.distributed as dist

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.work import WorkWatch
from distdiag.recorder import Calls, Recorder, ThreadContext

_METHODS: Final = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class CollectiveFronts(Probe):
    """Tells the tap what the dispatcher hides, and the work probe which Work came back."""

    name: ClassVar[str] = "collective-fronts"

    def __init__(self, recorder: Recorder, works: WorkWatch) -> None:
        """Hand each Work to `works`."""
        super().__init__(recorder)
        self._works = works
        self._reduce_kinds = (dist.ReduceOp, dist.ReduceOp.RedOpType)
        self._operators = _operator_numbers()

    def _install(self) -> None:
        kind = dist.ProcessGroup
        for name in _METHODS:
            if name in vars(kind):
                self._patches.replace(kind, name, self._front(vars(kind)[name], "reduce" in name))
        if "_start_coalescing" in vars(kind) and "_end_coalescing" in vars(kind):
            start, end = vars(kind)["_start_coalescing"], vars(kind)["_end_coalescing"]
            self._patches.replace(kind, "_start_coalescing", self._start_front(start))
            self._patches.replace(kind, "_end_coalescing", self._end_front(end))

    def _front(self, original: AnyCallable, reduces: bool) -> AnyCallable:
        here, recorder, asked = self.recorder.here, self.recorder, self._asked

        @wrap_like(original)
        def method(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.off or recorder.closed:
                return original(self_, *args, **kwargs)
            context = here.context
            before = context.reduce_op, context.calls
            calls: Calls = []
            try:
                context.calls = calls
                if reduces:
                    context.reduce_op = asked(args, kwargs)
            except Exception as error:  # noqa: BLE001 (our part must not break the user's)
                self.fail(error)
            try:
                work = original(self_, *args, **kwargs)
            finally:
                context.reduce_op, context.calls = before
            if calls:
                self._returned(context, work, calls, context.is_async)
            return work

        return method

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the name of the reduce operator of a call."""
        options = kwargs.get("opts") if kwargs else args[-1] if args else None
        reduce_op = getattr(options, "reduceOp", None)
        if reduce_op is None:
            kinds = self._reduce_kinds
            reduce_op = next((a for a in (*args, *kwargs.values()) if isinstance(a, kinds)), None)
            if reduce_op is None:
                return None
        # The hash of an operator is its number: the cheapest way to tell it.
        return self._operators.get(hash(reduce_op)) or _operator_name(reduce_op)

    def _returned(
        self,
        context: ThreadContext,
        work: Any,  # noqa: ANN401
        calls: Calls,
        is_async: bool,
    ) -> None:
        try:
            if context.coalesced is not None:
                context.coalesced += calls
            elif isinstance(work, dist.Work):
                if is_async:
                    self._works.remember(work, calls)
                else:
                    self._works.expect_wait(work, calls)
            elif not is_async:
                for call, _ in calls:  # the backend waits by itself and returns nothing
                    self.recorder.state(call, "waited")
        except Exception as error:  # noqa: BLE001 (our part must not break the user's)
            self.fail(error)

    def _start_front(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def method(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not self.is_off:
                self.recorder.here.context.coalesced = []
            return original(self_, *args, **kwargs)

        return method

    def _end_front(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def method(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            context = self.recorder.here.context
            calls, context.coalesced = context.coalesced, None
            work = original(self_, *args, **kwargs)
            if calls and not self.is_off:
                # Whether its user wants to wait is not known here: never counted as dropped.
                self._returned(context, work, calls, is_async=False)
            return work

        return method


def _operator_numbers() -> dict[int, str]:
    """Return the names of the operators by their hashes, if these tell them apart."""
    kinds = dict(dist.ReduceOp.RedOpType.__members__)
    kinds.pop("PREMUL_SUM", None)  # it cannot be made without a factor
    names = {hash(dist.ReduceOp(kind)): name for name, kind in kinds.items()}
    return names if len(names) == len(kinds) and set(names) <= set(range(16)) else {}


def _operator_name(reduce_op: Any) -> str:  # noqa: ANN401
    kind = getattr(reduce_op, "op", reduce_op)
    return str(kind.name)
