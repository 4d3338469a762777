"""The step clock: which optimizer step a rank is in, and whether it runs backward."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Hashable
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch.autograd import graph
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.lifecycle import StepEnd, SteppedAlone
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.call_sites import frames_of, stack_key
from distdiag.probes.guard import guard
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

# Whether a rank that was launched with others has a process group when it first trains.

_OTHERS: Final = ("byteps", "hivemind", "horovod", "mpi4py", "ray", "torch_xla", "torchft")
"""Packages by which ranks exchange gradients without a process group of torch."""


def note_first_step(recorder: Recorder, frame: FrameType) -> None:
    """Write down that an optimizer steps for the first time while nothing connects the ranks."""
    num_launched, library = _num_launched(), _lone_library()
    if num_launched < 2 or (_is_connected() and not library):
        return
    recorder.event(
        SteppedAlone,
        num_launched=num_launched,
        library=library,
        others=tuple(name for name in _OTHERS if name in sys.modules),
        site=CallSite(frames_of(frame, recorder.main_script)),
    )


def _num_launched() -> int:
    """Return what the environment says now: a script may have said that it is alone."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def _lone_library() -> str:
    """Return the library that trains as one process, whatever the environment says."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})
    # Without a GPU and not told to use CPUs, it makes a process group that it never uses.
    return "accelerate" if shared.get("num_processes") == 1 else ""


def _is_connected() -> bool:
    # Who has not imported it has no process group.
    dist = sys.modules.get("torch.distributed")
    rpc = sys.modules.get("torch.distributed.rpc")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    has_rpc = rpc is not None and rpc.is_available() and rpc.api._is_current_rpc_agent_set()
    return has_group or bool(has_rpc)


# The clock.

_MOST_STACKS: Final = 256


class _Open(threading.local):
    """The depths of the stack at which steps of this thread have begun and not ended."""

    def __init__(self) -> None:
        self.depths: list[int] = []


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth += 1
        frame = frame.f_back
    return depth


class StepClock(Probe):
    """Closes a step at the outermost end of an optimizer's step.

    Optimizers that are made of optimizers fire the hooks for each part; several optimizers that
    step after one backward belong to one step; a gradient scaler that skips closes the step too.
    """

    name: ClassVar[str] = "steps"

    def __init__(
        self,
        recorder: Recorder,
        stepping: Signal[Any, FrameType],
        stepped: Signal[Any],
        ended: Signal[[]],
    ) -> None:
        """Begin before the first step; the signals tell of optimizers, and of steps that ended."""
        super().__init__(recorder)
        self._stepping = stepping
        self._stepped = stepped
        self._ended = ended
        self._open = _Open()
        self._closed_at: float | None = None
        self._num_backwards = 0

    def _install(self) -> None:
        self._to_undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        self._to_undo.append(register_optimizer_step_post_hook(self._after_step).remove)
        scaler = torch.amp.grad_scaler.GradScaler
        self._patches.wrap(scaler, "step", self._scaler_step)

    def _before_step(
        self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A compiled step must stay one graph: nothing of the probe may get into it.
        if torch.compiler.is_compiling() or self.is_off:
            return None
        frame = sys._getframe(1)
        self._begin(frame)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._then_tell(args[1], optimizer, frame), *args[2:]), kwargs
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._then_tell(closure, optimizer, frame)}
        self._stepping.emit(optimizer, frame)
        return None

    def _then_tell(self, closure: AnyCallable, optimizer: object, frame: FrameType) -> AnyCallable:
        """Return a closure that tells of the gradients that it has made, when first called."""
        is_reported = False

        @functools.wraps(closure)  # it may be a partial, without a name
        def made(*args: object, **kwargs: object) -> object:
            nonlocal is_reported
            result = closure(*args, **kwargs)
            if not is_reported and not self.is_off:
                is_reported = True
                self._stepping.emit(optimizer, frame)
            return result

        return made

    def _after_step(self, optimizer: object, *_: object) -> None:
        if torch.compiler.is_compiling() or self.is_off:
            return
        frame = sys._getframe(1)
        with guard(self.fail):  # one for all who are told: what it hides is most of its cost
            self._stepped.emit(optimizer)
            self._end(frame)

    def _scaler_step(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def step(self_: object, *args: object, **kwargs: object) -> object:
            frame = sys._getframe()
            if not self.is_off:
                self._begin(frame)
            result = original(self_, *args, **kwargs)
            if not self.is_off:
                self._end(frame)
            return result

        return step

    def _begin(self, frame: FrameType) -> None:
        with self.guard:
            depth, depths = _depth(frame), self._open.depths
            while depths and depths[-1] >= depth:
                depths.pop()  # that step raised: hooks after it never ran
            depths.append(depth)
            if self._closed_at is None:
                self._closed_at = time.monotonic()
                note_first_step(self.recorder, frame)
            if len(depths) == 1:
                self.recorder.set_phase(Phase.OPTIMIZER)

    def _end(self, frame: FrameType) -> None:
        with guard(self.fail):
            depth, depths = _depth(frame), self._open.depths
            was_open = bool(depths)
            while depths and depths[-1] >= depth:
                depths.pop()
            if was_open and not depths:
                self._close()

    def _close(self) -> None:
        recorder, now = self.recorder, time.monotonic()
        recorder.set_phase(Phase.SCRIPT)
        num_backwards = recorder.num_backwards - self._num_backwards
        if num_backwards == 0 and recorder.num_backwards > 0:
            return  # another optimizer of the same step
        duration_s = now - (self._closed_at or now)
        self._closed_at, self._num_backwards = now, recorder.num_backwards
        recorder.event(StepEnd, duration_s=duration_s, num_backwards=num_backwards)
        recorder.step += 1
        recorder.push_progress()
        self._ended.emit()


class BackwardProbe(Probe):
    """Counts backward passes, and remembers from where the one that runs was called.

    On GPUs the hooks of backward run on threads of C++, whose stacks do not show the user's code.
    """

    name: ClassVar[str] = "backward"

    def __init__(
        self,
        recorder: Recorder,
        coming: Signal[[]],
        started: Signal[object],
        ended: Signal[bool],
    ) -> None:
        """Begin before the first pass; the signals tell of those of the training."""
        super().__init__(recorder)
        self._coming = coming
        self._started = started
        self._ended = ended
        self._stacks: dict[Hashable, tuple[tuple[Frame, ...], object]] = {}

    def _install(self) -> None:
        self._patches.wrap_everywhere(graph, "_engine_run_backward", self._wrapper)

    def _wrapper(self, original: AnyCallable) -> AnyCallable:
        here = self.recorder.here

        @wrap_like(original)
        def run_backward(*args: object, **kwargs: object) -> object:
            # Inside a pass (activation checkpointing) it is still the same one.
            context = here.context
            if self.is_off or context.backward_depth:
                return original(*args, **kwargs)
            context.backward_depth = 1
            recorder, accumulates = self.recorder, bool(kwargs.get("accumulate_grad"))
            outer, phase, frame = recorder.backward, recorder.phase, sys._getframe(1)
            with guard(self.fail):  # one for all who are told: what it hides is most of its cost
                if accumulates:
                    self._coming.emit()
                    phase = recorder.phase
                self._begin(frame, counts=accumulates)
                if accumulates:
                    self._started.emit(args[0] if args else kwargs.get("t_outputs"))
            is_complete = False
            try:
                result = original(*args, **kwargs)
                is_complete = True
                return result
            finally:
                if accumulates:
                    with guard(self.fail):
                        self._ended.emit(is_complete)
                context.backward_depth = 0
                recorder.backward = outer
                self._enter(phase)

        return run_backward

    def _begin(self, frame: FrameType, *, counts: bool) -> None:
        recorder = self.recorder
        key = stack_key(frame)
        known = self._stacks.get(key)
        if known is None:
            if len(self._stacks) >= _MOST_STACKS:
                self._stacks.clear()
            known = self._stacks[key] = (frames_of(frame, recorder.main_script), _codes(frame))
        recorder.backward = (key, known[0])
        recorder.set_phase(Phase.BACKWARD)
        if counts:
            recorder.num_backwards += 1
            recorder.push_progress()


def _codes(frame: FrameType | None) -> list[object]:
    """Return what must stay alive for the ids in the key to stay valid."""
    codes: list[object] = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes
