"""Observes what is loaded into models and optimizers, and what came of it when they are used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distdiag.checkpoint_event import LoadWasted, TrainingResumed, WeightsLoaded
from distdiag.event import CallSite
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.guard import guarded
from distdiag.probes.model_loads import ModelLoads, Outcome, outcome_of, refusal_of
from distdiag.probes.optimizer_state import parameters_of
from distdiag.probes.resumes import Resumes
from distdiag.probes.stack import frames_of
from distdiag.probes.wasted_loads import WastedLoads
from distdiag.recorder import Recorder


class _Inside(threading.local):
    depth = 0


class LoadWatch(Probe):
    """Writes down what loads have left out or lost, when the next optimizer step begins."""

    name: ClassVar[str] = "loads"

    def __init__(self, recorder: Recorder) -> None:
        """Know of no load yet."""
        super().__init__(recorder)
        self._loads = ModelLoads()
        self._wasted = WastedLoads(self._loads, self._roots)
        self._resumes = Resumes(self._loads, self._roots)
        self._inside = _Inside()
        self._handles: list[Any] = []
        self._num_settled = 0

    def _install(self) -> None:
        self._patches.wrap(nn.Module, "load_state_dict", self._around_load)
        optimizer = torch.optim.Optimizer
        self._tell_after(optimizer, self._restored)
        for kind in list(vars(lr_scheduler).values()):
            is_kind = isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
            if is_kind and "load_state_dict" in vars(kind):
                self._tell_after(kind, self._scheduled)
        self._patches.wrap_everywhere(torch.serialization, "load", self._around_read)
        self.recorder.after_read = self._read
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def uninstall(self) -> None:
        """Remove the hooks."""
        super().uninstall()
        while self._handles:
            self._handles.pop().remove()

    def _roots(self) -> list[nn.Module]:
        live = self.recorder.live_models
        return [] if live is None else live()

    def _site(self, frame: FrameType) -> CallSite:
        return CallSite(frames_of(frame, self.recorder.main_script))

    # What is loaded

    def _around_load(self, original: AnyCallable) -> AnyCallable:
        inside = self._inside

        @wrap_like(original)
        def load_state_dict(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.is_off or inside.depth or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            inside.depth += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._loaded(args, kwargs, refusal_of(error), sys._getframe())
                raise
            finally:
                inside.depth -= 1
            self._loaded(args, kwargs, outcome_of(result), sys._getframe())
            return result

        return load_state_dict

    @guarded
    def _loaded(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outcome: Outcome | None,
        frame: FrameType,
    ) -> None:
        module, given = _arguments(*args, **kwargs)
        if outcome is None or not isinstance(given, Mapping):
            return
        self._loads.add(module, given, outcome, self.recorder.step, self._site(frame))
        self._resumes.gave_weights(given)
        if self.recorder.step == 0:
            self._wasted.wrote(module, self._site(frame))

    def _tell_after(self, kind: type, tell: Callable[..., None]) -> None:
        def telling(original: AnyCallable) -> AnyCallable:
            @wrap_like(original)
            def load_state_dict(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                result = original(*args, **kwargs)
                tell(*_arguments(*args, **kwargs))
                return result

            return load_state_dict

        self._patches.wrap(kind, "load_state_dict", telling)

    @guarded
    def _restored(self, optimizer: torch.optim.Optimizer, state_dict: object) -> None:
        self._resumes.gave_state(optimizer, state_dict)

    @guarded
    def _scheduled(self, scheduler: object, _: object) -> None:
        self._resumes.gave_schedule(scheduler)

    def _around_read(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def load(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(*args, **kwargs)
            self._opened(result)
            return result

        return load

    @guarded
    def _opened(self, found: object) -> None:
        self._resumes.read_file(found)

    @guarded
    def _read(self, state_dict: Mapping[str, Any], frame: FrameType) -> None:
        if self.recorder.step == 0:
            api = "torch.distributed.checkpoint.load"
            self._wasted.read(api, state_dict, self._site(frame))

    # What came of it

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self.recorder.num_backwards:
            return  # not a step of the training: it makes the states of the optimizer
        for fields, site in self._loads.settle():
            self.recorder.event(WeightsLoaded, site=site, **fields)
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        for fields, site in self._wasted.settle(held):
            self.recorder.event(LoadWasted, site=site, **fields)
        self._resumes.before_step(optimizer, is_first=self.recorder.step == 0)

    @guarded
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        fields = self._resumes.after_step(optimizer)
        if fields:
            site = self._site(sys._getframe(1))
            self.recorder.event(TrainingResumed, site=site, **fields)


def _arguments(
    self: Any,  # noqa: ANN401
    state_dict: object = None,
    *_: object,
    **__: object,
) -> tuple[Any, object]:
    return self, state_dict
