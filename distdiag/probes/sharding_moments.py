"""When FSDP2 wraps a module, and when a wrapped one is used for the first time."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from distdiag.probes.base import AnyCallable, Probe, wrap_like


class ShardingMoments(Probe):
    """Tells whoever looks at models that FSDP2 has changed them."""

    name: ClassVar[str] = "sharding-moments"

    def _install(self) -> None:
        for name, around in (("init", self._wrapping), ("_lazy_init", self._first_use)):
            self._patches.wrap(FSDPState, name, around)

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
            before_forward = self.recorder.before_forward
            is_first = getattr(self_, "_is_root", True) is None
            if is_first and before_forward is not None and not self.is_off:
                before_forward()
            return original(self_, *args, **kwargs)

        return lazy_init
