"""Collectives seen where torch's dispatcher chooses a backend.

A Python kernel at the dispatch key ``BackendSelect`` sees what is issued by the C++ reducer of DDP,
by functional collectives and by compiled code, on every thread and every group, with all arguments.
It costs as much as all the rest of a record, so the kernels are put in place when the first such
caller shows up; what Python code issues itself is seen by the wrappers of process groups.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey
from torch._C._distributed_c10d import HashStore as _HashStore

from distdiag.events.lifecycle import TorchLoaded
from distdiag.probes.call_sites import find_site
from distdiag.probes.collectives.functional import KEY
from distdiag.probes.collectives.operators import ASYNC_MESSAGES, OPS, Layout
from distdiag.probes.collectives.tap import Tap, TapError, dtype_of, shape_of
from distdiag.probes.out_of_sight import out_of_sight, reading_attributes
from distdiag.probes.untyped import Untyped
from distdiag.record.event_file import ISSUED, WAITED
from distdiag.record.guard import attempt
from distdiag.record.thread_context import ThreadContext

Kernel = Callable[..., Any]

_unbox = dist.ProcessGroup.unbox
_TESTED = "allreduce_"


class DispatcherTap(Tap):
    """Registers a kernel for each operator of the namespace ``c10d``."""

    _after = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
    _engaging = threading.Lock()
    _library: object = None

    def can_observe(self) -> bool:
        """Issue one collective with a kernel of ours in the way, and take the kernel out again."""
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{_TESTED}", KEY):
            return False
        with out_of_sight():
            return self._sees_calls()

    def _sees_calls(self) -> bool:
        fake = getattr(torch._C._distributed_c10d, "FakeProcessGroup", None)
        create = getattr(fake, "_create_internal", None)
        if create is None:
            return True  # a torch without it is tested by its first real call
        redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
        seen: list[bool] = []

        def kernel(keyset: Untyped, *args: Untyped, **kwargs: Untyped) -> object:
            seen.append(True)
            return redispatch(keyset & self._after, *args, **kwargs)

        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        library.impl(_TESTED, kernel, KEY, with_keyset=True)
        try:
            group = dist.ProcessGroup(_HashStore(), 0, 1)
            group._register_backend(
                torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, create(0, 1)
            )
            group.allreduce([torch.zeros(1, device="cpu")])
        finally:
            library._destroy()
        return bool(seen)

    def _install(self) -> None:
        if not self.can_observe():
            raise TapError(f"the dispatcher does not call our kernels at {KEY}")
        self._functional.before_first_call = self.engage
        self.recorder.event(TorchLoaded, torch=str(torch.__version__), tap="dispatcher")

    def engage(self) -> None:
        """Put the kernels in place, once."""
        if self._library is not None or self.is_off or not self._engaging.acquire(blocking=False):
            return
        try:
            with self.guard:
                self._library = self._kernels()
        finally:
            self._engaging.release()

    def _kernels(self) -> object:
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._to_undo.append(library._destroy)
        for name in OPS:
            op = getattr(getattr(torch.ops.c10d, name, None), "default", None)
            if op is not None:
                kernel = self._kernel(Layout(name, op._schema), op)
                library.impl(name, kernel, KEY, with_keyset=True)
        return library

    def _kernel(self, layout: Layout, op: Untyped) -> Kernel:
        # Looked up here once: each attribute costs in a place where microseconds count.
        after, before = self._after, self._before
        failed, fail = self.failed, self.fail
        redispatch = op._handle.redispatch_boxed
        recorder, here = self.recorder, self.recorder.here
        mark = recorder.mark
        returns_late = layout.is_async is None and not layout.spec.is_message

        def kernel(keyset: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            call: int | None = None
            context = here.context
            if context.is_recorded:
                context.is_recorded = False
            elif not self.off and not recorder.closed:
                with reading_attributes():
                    call = attempt(fail, before, context, layout, args, kwargs)
            if call is None:
                return redispatch(keyset & after, *args, **kwargs)
            try:
                result = redispatch(keyset & after, *args, **kwargs)
            except BaseException:
                failed(call)
                raise
            if not self.off:
                attempt(fail, mark, call, ISSUED)
                if returns_late:  # a monitored barrier returns when all ranks were there
                    attempt(fail, mark, call, WAITED)
            return result

        return kernel

    def _before(
        self,
        context: ThreadContext,
        layout: Layout,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> int | None:
        if kwargs:
            args = layout.bind(args, kwargs)
        inputs = () if layout.inputs is None else layout.inputs(args)
        outputs = () if layout.outputs is None else layout.outputs(args)
        shown = inputs or outputs
        if shown and shown[0].is_meta:
            return None  # a compiler asks for shapes; nothing is issued
        handle = _unbox(args[layout.process_group])
        group = self._groups.get(id(handle))
        if group is None or group.handle() is not handle:
            group = self._learn(handle)
        if group is None:
            return None
        spec = layout.spec
        key = (
            spec.public,
            tuple(map(shape_of, inputs)),
            tuple(map(shape_of, outputs)),
            tuple(map(dtype_of, shown)),
            layout.details(args, group.value.ranks) if layout.has_details else None,
            context.reduce_op,
        )
        # On a thread of C++ nothing of Python called the kernel.
        site = find_site(self.recorder, context, sys._getframe(2).f_back)
        if layout.is_async is not None:
            is_async = bool(layout.is_async.of(args))
        else:
            is_async = spec.is_message and site.api in ASYNC_MESSAGES
        return self._write(
            context,
            group,
            key,
            site,
            is_message=spec.is_message,
            is_async=is_async,
            results=outputs or shown,
        )
