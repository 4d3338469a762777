"""When FSDP wraps a module, and when a wrapped one is used for the first time."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.by_identity import WeakMembers
from distdiag.recorder import Recorder


class ShardingMoments(Probe):
    """Tells whoever looks at models that FSDP has changed them, or is about to use them."""

    name: ClassVar[str] = "sharding-moments"

    def __init__(self, recorder: Recorder) -> None:
        """Nothing was used yet."""
        super().__init__(recorder)
        self._used: WeakMembers[nn.Module] = WeakMembers()

    def _install(self) -> None:
        for name, around in (("init", self._wrapping), ("_lazy_init", self._first_use)):
            self._patches.wrap(FSDPState, name, around)
        self._patches.wrap_everywhere(_runtime_utils, "_root_pre_forward", self._each_use)

    def _tell(self) -> None:
        before_forward = self.recorder.before_forward
        if before_forward is not None and not self.is_off:
            before_forward()

    def _wrapping(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def init(self_: Any, modules: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(self_, modules, *args, **kwargs)
            after_wrap = self.recorder.after_wrap
            if after_wrap is not None and not self.is_off:
                after_wrap(modules)
            return result

        return init

    def _first_use(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def lazy_init(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if getattr(self_, "_is_root", True) is None:
                self._tell()
            return original(self_, *args, **kwargs)

        return lazy_init

    def _each_use(self, original: AnyCallable) -> AnyCallable:
        """Tell of the first use of a root of the first FSDP; loading initialises it before that."""

        @wrap_like(original)
        def root_pre_forward(state: Any, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            is_part = getattr(state, "_is_root", None) is False or torch.compiler.is_compiling()
            if not is_part and module not in self._used:
                self._used.add(module)
                self._tell()
            return original(state, module, *args, **kwargs)

        return root_pre_forward
