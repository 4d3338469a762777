"""When a model that FSDP keeps is given its inputs, and when its forward pass is over."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from distdiag.probes.base import AnyCallable, Probe, like


class ShardedForwards(Probe):
    """Tells whoever looks at what models are fed; compiled code is left alone."""

    name: ClassVar[str] = "sharded-forwards"

    def _install(self) -> None:
        for owner, name, around in (
            (FSDPState, "_root_pre_forward", self._beginning),
            (FSDPState, "_post_forward", self._end),
            (FullyShardedDataParallel, "forward", self._whole),
        ):
            self._patches.wrap(owner, name, around)

    def _beginning(self, original: AnyCallable) -> AnyCallable:
        recorder = self.recorder

        @like(original)
        def root_pre_forward(self_: Any, module: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
            if torch.compiler.is_compiling() or recorder.before_model is None:
                return original(self_, module, args, kwargs)
            result = original(self_, module, args, kwargs)
            recorder.before_model(module, (args, kwargs))
            return result

        return root_pre_forward

    def _end(self, original: AnyCallable) -> AnyCallable:
        recorder = self.recorder

        @like(original)
        def post_forward(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if torch.compiler.is_compiling() or recorder.after_model is None:
                return original(self_, *args, **kwargs)
            is_root = getattr(self_._state_ctx, "iter_forward_root", None) is self_
            result = original(self_, *args, **kwargs)
            if is_root:
                recorder.after_model(result)
            return result

        return post_forward

    def _whole(self, original: AnyCallable) -> AnyCallable:
        recorder = self.recorder

        @like(original)
        def forward(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if torch.compiler.is_compiling() or recorder.before_model is None:
                return original(self_, *args, **kwargs)
            is_outermost = recorder.before_model(self_, (args, kwargs))
            result = None
            try:
                result = original(self_, *args, **kwargs)
            finally:
                if is_outermost and recorder.after_model is not None:
                    recorder.after_model(result)
            return result

        return forward
