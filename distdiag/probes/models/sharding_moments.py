"""When FSDP wraps a module, and when a wrapped one is used for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from distdiag.probes.base import AnyCallable, Probe, like
from distdiag.probes.tensors.by_identity import WeakMembers
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# When a model that FSDP keeps is given its inputs, and when its forward pass is over.


class ShardedForwards(Probe):
    """Tells whoever looks at what models are fed; compiled code is left alone."""

    name: ClassVar[str] = "sharded-forwards"

    def __init__(
        self,
        recorder: Recorder,
        started: Signal[object, nn.Module, object],
        ended: Signal[object, object],
    ) -> None:
        super().__init__(recorder)
        self._started = started
        self._ended = ended

    def _install(self) -> None:
        for owner, name, around in (
            (FSDPState, "_root_pre_forward", self._beginning),
            (FSDPState, "_post_forward", self._end),
            (FullyShardedDataParallel, "forward", self._whole),
        ):
            self._patches.wrap(owner, name, around)

    def _beginning(self, original: AnyCallable) -> AnyCallable:
        started = self._started

        @like(original)
        def root_pre_forward(
            self_: Untyped, module: Untyped, args: Untyped, kwargs: Untyped
        ) -> Untyped:
            result = original(self_, module, args, kwargs)
            if not torch.compiler.is_compiling():
                started.emit(self_, module, (args, kwargs))
            return result

        return root_pre_forward

    def _end(self, original: AnyCallable) -> AnyCallable:
        ended = self._ended

        @like(original)
        def post_forward(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            if torch.compiler.is_compiling():
                return original(self_, *args, **kwargs)
            is_root = getattr(self_._state_ctx, "iter_forward_root", None) is self_
            result = original(self_, *args, **kwargs)
            if is_root:
                ended.emit(self_, result)
            return result

        return post_forward

    def _whole(self, original: AnyCallable) -> AnyCallable:
        started, ended = self._started, self._ended

        @like(original)
        def forward(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            if torch.compiler.is_compiling():
                return original(self_, *args, **kwargs)
            started.emit(self_, self_, (args, kwargs))
            result = None
            try:
                result = original(self_, *args, **kwargs)
            finally:
                ended.emit(self_, result)
            return result

        return forward


# The probe.


class ShardingMoments(Probe):
    """Tells whoever looks at models that FSDP has changed them, or is about to use them."""

    name: ClassVar[str] = "sharding-moments"

    def __init__(
        self,
        recorder: Recorder,
        wrapped: Signal[Sequence[nn.Module]],
        first_forward: Signal[[]],
    ) -> None:
        """Tell by these signals; nothing was used yet."""
        super().__init__(recorder)
        self._wrapped = wrapped
        self._first_forward = first_forward
        self._used: WeakMembers[nn.Module] = WeakMembers()

    def _install(self) -> None:
        self._patches.wrap(FSDPState, "init", self._call_after(self._after_init))
        self._patches.wrap(FSDPState, "_lazy_init", self._call_before(self._before_lazy_init))
        each_use = self._call_before(self._each_use)
        self._patches.wrap_everywhere(_runtime_utils, "_root_pre_forward", each_use)

    def _after_init(
        self, _: object, __: object, modules: Sequence[nn.Module], *___: object, **____: object
    ) -> None:
        self._wrapped.emit(modules)

    def _before_lazy_init(self, state: object, *_: object, **__: object) -> None:
        if getattr(state, "_is_root", True) is None:
            self._first_forward.emit()

    def _each_use(self, state: object, module: nn.Module, *_: object, **__: object) -> None:
        """Tell of the first use of a root of the first FSDP; loading initialises it before that."""
        is_part = getattr(state, "_is_root", None) is False or torch.compiler.is_compiling()
        if not is_part and module not in self._used:
            self._used.add(module)
            self._first_forward.emit()
