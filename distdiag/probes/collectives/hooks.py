"""Collectives seen through the hooks of torch >= 2.14, where the dispatcher does not let us in.

The hooks belong to one process group each, so every new group gets them. They tell less than the
dispatcher: no tags, no splits, and nothing of a monitored barrier.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore as _HashStore
from torch.distributed import distributed_c10d

from distdiag.events.lifecycle import TorchLoaded
from distdiag.probes.call_sites import find_site
from distdiag.probes.collectives.operators import ASYNC_MESSAGES, NO_DETAILS
from distdiag.probes.collectives.tap import Tap, TapError, dtype_of, shape_of
from distdiag.probes.out_of_sight import out_of_sight, reading_attributes
from distdiag.probes.untyped import Untyped
from distdiag.record.event_file import ISSUED
from distdiag.record.recorder import Site

_HOOK_ID: Final = 0x64646961
"""Others may use hooks as well; this number is ours."""

_MESSAGES: Final = {"SEND": "send", "RECV": "recv"}
_ROOTED: Final = {
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "SCATTER": "scatter",
    "GATHER": "gather",
}
# One name of the hooks stands for several functions; the call site tells which, where it knows.
_FAMILIES: Final = {
    "ALLREDUCE": ("all_reduce", "all_reduce_coalesced"),
    "ALLGATHER": ("all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
    "REDUCE_SCATTER": ("reduce_scatter", "reduce_scatter_tensor"),
    "ALLTOALL": ("all_to_all", "all_to_all_single"),
    "BARRIER": ("barrier",),
}


class HookTap(Tap):
    """Hangs hooks on all process groups that there are and on those that come."""

    def can_observe(self) -> bool:
        """Issue one collective on a group of its own with a hook on it."""
        if not hasattr(dist.ProcessGroup, "register_pre_hook"):
            return False
        create = torch._C._distributed_c10d.FakeProcessGroup._create_internal
        group: Any = dist.ProcessGroup(_HashStore(), 0, 1)
        group._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, create(0, 1)
        )
        seen: list[str] = []
        group.register_pre_hook(_HOOK_ID, lambda args: seen.append(args.name.name))
        with out_of_sight():
            group.allreduce([torch.zeros(1, device="cpu")])
        return seen == ["ALLREDUCE"]

    def _install(self) -> None:
        if not self.can_observe():
            raise TapError("this torch has no working hooks for collectives")
        self._calls: dict[tuple[int, int], int] = {}
        attaching = self._call_after(self._made)
        for name in ("_new_process_group_helper", "split_group"):
            if not self._patches.wrap_everywhere(distributed_c10d, name, attaching):
                raise TapError("it is not seen when process groups are made")
        for handle in list(distributed_c10d._world.pg_map):
            self._attach(handle)
        self.recorder.event(TorchLoaded, torch=str(torch.__version__), tap="hooks")

    def uninstall(self) -> None:
        """Take the hooks off the groups that still exist."""
        super().uninstall()
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        for handle in groups:
            handle.unregister_pre_hook(_HOOK_ID)
            handle.unregister_post_hook(_HOOK_ID)

    def _made(self, made: object, *_: object, **__: object) -> None:
        with self.guard:
            self._attach(made[0] if isinstance(made, tuple) else made)

    def _attach(self, handle: Untyped) -> None:
        if not isinstance(handle, dist.ProcessGroup):
            return  # this rank is not a member
        hooked: Any = handle
        # The id and not the group: a hook that held its group would keep it alive.
        number = id(handle)
        groups = distributed_c10d._world.pg_map

        def before(args: object) -> None:
            if self.is_off:
                return
            with self.guard:
                group = next((group for group in groups if id(group) == number), None)
                if group is not None:
                    with reading_attributes():
                        self._before(group, args)

        def after(args: Untyped) -> None:
            call = self._calls.pop((number, args.op_id), None)
            if call is not None:
                self.mark(call, ISSUED)

        hooked.register_pre_hook(_HOOK_ID, before)
        hooked.register_post_hook(_HOOK_ID, after)

    def _before(self, handle: Untyped, args: Untyped) -> None:
        context = self.recorder.here.context
        if context.is_recorded:
            context.is_recorded = False
            return
        group = self._group(handle)
        if group is None or any(tensor.is_meta for tensor in args.input_tensors):
            return
        site = find_site(self.recorder, context, sys._getframe(1).f_back)
        kind = args.name.name
        is_message = kind in _MESSAGES
        op = _op(kind, site, args)
        peer = group.value.ranks[args.root] if args.root >= 0 else None
        root, peer = (None, peer) if is_message else (peer, None)
        details = (root, peer, *NO_DETAILS[2:]) if is_message or root is not None else None
        inputs, outputs = args.input_tensors, args.output_tensors
        if kind == "RECV":
            inputs, outputs = (), inputs or outputs
        shown = inputs or outputs
        key = (
            op,
            tuple(map(shape_of, inputs)),
            tuple(map(shape_of, outputs)),
            tuple(map(dtype_of, shown)),
            details,
            context.reduce_op,
        )
        is_async = site.api in ASYNC_MESSAGES if is_message else bool(args.async_op)
        call = self._write(
            context,
            group,
            key,
            site,
            is_message=is_message,
            is_async=is_async,
            results=outputs or shown,
        )
        self._calls[id(handle), args.op_id] = call


def _op(kind: str, site: Site, args: Untyped) -> str:
    if kind == "RECV" and args.root < 0:
        return "recv_any_source"
    if kind in _MESSAGES or kind in _ROOTED:
        return _MESSAGES.get(kind) or _ROOTED[kind]
    family = _FAMILIES.get(kind, (kind.lower(),))
    return site.api if site.api in family else family[0]
