"""When FSDP wraps a module, and when a wrapped one is used for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from distdiag.probes.base import AnyCallable, Probe, like, wrap_like
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
        """Tell by these signals of each forward pass that starts, and of each that ended."""
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
        for name, around in (("init", self._wrapping), ("_lazy_init", self._first_use)):
            self._patches.wrap(FSDPState, name, around)
        self._patches.wrap_everywhere(_runtime_utils, "_root_pre_forward", self._each_use)

    def _tell(self) -> None:
        if not self.is_off:
            self._first_forward.emit()

    def _wrapping(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def init(self_: Untyped, modules: Untyped, *args: Untyped, **kwargs: Untyped) -> object:
            result = original(self_, modules, *args, **kwargs)
            if not self.is_off:
                self._wrapped.emit(modules)
            return result

        return init

    def _first_use(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def lazy_init(self_: object, *args: object, **kwargs: object) -> object:
            if getattr(self_, "_is_root", True) is None:
                self._tell()
            return original(self_, *args, **kwargs)

        return lazy_init

    def _each_use(self, original: AnyCallable) -> AnyCallable:
        """Tell of the first use of a root of the first FSDP; loading initialises it before that."""

        @wrap_like(original)
        def root_pre_forward(
            state: Untyped, module: Untyped, *args: Untyped, **kwargs: Untyped
        ) -> Untyped:
            is_part = getattr(state, "_is_root", None) is False or torch.compiler.is_compiling()
            if not is_part and module not in self._used:
                self._used.add(module)
                self._tell()
            return original(state, module, *args, **kwargs)

        return root_pre_forward
