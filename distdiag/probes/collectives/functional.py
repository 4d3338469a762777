"""Functional collectives (DTensor, compiled code): their operator, and when they are waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch._C import DispatchKey

from distdiag.probes.base import Probe
from distdiag.probes.collectives.functional_exchanges import ExchangeLayout
from distdiag.probes.guard import guard
from distdiag.probes.out_of_sight import reading_attributes
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

Kernel = Callable[..., Any]

KEY: Final = "BackendSelect"
_NAMESPACE: Final = "_c10d_functional"
_MOST_PENDING: Final = 4096
"""So many calls are remembered until somebody waits for their result."""


class FunctionalTap(Probe):
    """Sees the layer above the collectives, where the operator still is a word.

    What a functional collective returns is waited for by the memory that it lies in: no Work
    reaches Python.
    """

    name: ClassVar[str] = "functional-collectives"

    def __init__(
        self,
        recorder: Recorder,
        exchanging: Signal[str, Sequence[torch.Tensor], Any, int, FrameType],
    ) -> None:
        """Remember no call yet; tell of exchanges by this signal."""
        super().__init__(recorder)
        self._exchanging = exchanging
        self._after = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
        self.before_first_call: Callable[[], None] = _nothing
        self._pending: dict[int, int] = {}

    def _install(self) -> None:
        # Tensors that only ask for a shape (FakeTensor) have Meta in their keys.
        library: Any = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
        self._to_undo.append(library._destroy)
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            is_taken = namespace != _NAMESPACE or "." in name
            if is_taken or torch._C._dispatch_has_kernel_for_dispatch_key(full_name, KEY):
                continue
            op = getattr(getattr(torch.ops, _NAMESPACE), name).default
            waits = name == "wait_tensor"
            kernel = self._wait_kernel(op) if waits else self._kernel(op, name)
            library.impl(name, kernel, KEY, with_keyset=True)

    def remember(self, tensors: Untyped, call: int) -> None:
        """Note that these tensors will hold the result of a call."""
        pending = self._pending
        for tensor in tensors:
            if len(pending) >= _MOST_PENDING:
                pending.pop(next(iter(pending)), None)
            pending[_address(tensor)] = call

    def _kernel(self, op: Untyped, name: str) -> Kernel:
        after, here, exchanging = self._after, self.recorder.here, self._exchanging
        layout = ExchangeLayout(name, op._schema)
        names = [argument.name for argument in op._schema.arguments]
        place = names.index("reduce_op") if "reduce_op" in names else len(names)

        def kernel(keyset: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            if self.is_off or keyset.has(DispatchKey.Meta):
                return op.redispatch(keyset & after, *args, **kwargs)
            if self.before_first_call is not _nothing:
                first, self.before_first_call = self.before_first_call, _nothing
                first()
            if layout.may_exchange and exchanging.subscribers:
                self._exchange(layout, args, kwargs, sys._getframe(1))
            context = here.context
            before = context.reduce_op, context.is_functional
            reduce_op = args[place] if place < len(args) else kwargs.get("reduce_op")
            context.reduce_op = None if reduce_op is None else str(reduce_op).upper()
            context.is_functional = True
            try:
                return op.redispatch(keyset & after, *args, **kwargs)
            finally:
                context.reduce_op, context.is_functional = before

        return kernel

    def _exchange(
        self,
        layout: ExchangeLayout,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> None:
        with guard(self.fail):
            given = layout.read(args, kwargs)
            self._exchanging.emit(given.public, given.tensors, given.group, given.peer, frame)

    def _wait_kernel(self, op: Untyped) -> Kernel:
        after, pending = self._after, self._pending

        def kernel(keyset: Untyped, tensor: Untyped) -> Untyped:
            call: int | None = None
            if pending and not self.is_off and not keyset.has(DispatchKey.Meta):
                with reading_attributes():
                    call = pending.pop(_address(tensor), None)
            result = op.redispatch(keyset & after, tensor)
            if call is not None:
                self._waited(call)
            return result

        return kernel

    def _waited(self, call: int) -> None:
        with self.guard:
            self.recorder.state(call, "waited")


def _nothing() -> None:
    """There is nothing to do."""


def _address(tensor: Untyped) -> int:
    """Tell a tensor by its memory (0 for one that has none), without reading it."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0
