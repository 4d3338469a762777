"""Which sharded module a collective of FSDP2 works for."""

from __future__ import annotations

from typing import ClassVar, Final

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.guard import guard
from distdiag.probes.models.modules import clean_name
from distdiag.probes.untyped import Untyped

_METHODS: Final = ("unshard", "wait_for_unshard", "post_backward")


class ShardingContext(Probe):
    """Names the module while its parameters are gathered or its gradients reduced."""

    name: ClassVar[str] = "sharding-context"

    def _install(self) -> None:
        for name in _METHODS:
            self._patches.wrap(FSDPParamGroup, name, self._within)

    def _within(self, original: AnyCallable) -> AnyCallable:
        here = self.recorder.here

        @wrap_like(original)
        def method(self_: Untyped, *args: Untyped, **kwargs: Untyped) -> Untyped:
            if self.is_off:
                return original(self_, *args, **kwargs)
            context = here.context
            before = context.module
            with guard(self.fail):
                name = self_._module_fqn
                context.module = None if name is None else clean_name(name)
            try:
                return original(self_, *args, **kwargs)
            finally:
                context.module = before

        return method
