"""Lists of parameters and buffers that DDP is told to leave to each rank."""

from __future__ import annotations

import sys
from types import FrameType
from typing import ClassVar

from torch.nn.parallel import DistributedDataParallel

from distdiag.events.base import CallSite
from distdiag.events.models import PlanSource
from distdiag.probes.base import AnyCallable, wrap_like
from distdiag.probes.call_sites import frames_of
from distdiag.probes.guard import guarded
from distdiag.probes.models.plan_patterns import PlanProbe, outcome
from distdiag.probes.untyped import Untyped

_LIST = "_ddp_params_and_buffers_to_ignore"


class IgnoreLists(PlanProbe):
    """Looks up each name of the list when DDP wraps a model; DDP skips what does not exist."""

    name: ClassVar[str] = "ignore-lists"

    def _install(self) -> None:
        # Not the constructor: its warnings name the line of whoever calls it.
        self._patches.wrap(DistributedDataParallel, "_ddp_init_helper", self._wrapping)

    def _wrapping(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def init_helper(self_: object, *args: object, **kwargs: object) -> object:
            result = original(self_, *args, **kwargs)
            if not self.is_off:
                self._look(self_, sys._getframe(1))
            return result

        return init_helper

    @guarded
    def _look(self, wrapper: Untyped, frame: FrameType) -> None:
        model = wrapper.module
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        found = [
            outcome(name, "ignored", [name] if name in names else [], names)
            for name in getattr(model, _LIST, ())
        ]
        if found:
            site = CallSite(frames_of(frame, self.recorder.main_script))
            self._tell(PlanSource.DDP_IGNORED, type(model).__name__, found, site)
