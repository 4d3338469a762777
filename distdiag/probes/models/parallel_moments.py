"""When a model is made tensor-parallel: it begins anew, as another one."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.distributed.tensor.parallel import api

from distdiag.probes.base import AnyCallable, Probe, wrap_like


class ParallelMoments(Probe):
    """Tells whoever looks at models that `parallelize_module` has changed one."""

    name: ClassVar[str] = "parallel-moments"

    def _install(self) -> None:
        self._patches.wrap_everywhere(api, "parallelize_module", self._telling)

    def _telling(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def parallelize_module(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(module, *args, **kwargs)
            after_wrap = self.recorder.after_wrap
            if after_wrap is not None and not self.is_off:
                after_wrap((module,))
            return result

        return parallelize_module
