"""Records how a run routes, for a comparison with the same run again.

This is an active mode: a rank waits for its own device when it records, and ends after the steps
that were asked for. It never waits for another rank, and the values of the run stay what they are.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import graph
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.guard import guard, guarded
from distdiag.probes.random_states import generator_states
from distdiag.probes.routing_arrays import choice_of, digests_of, is_whole, sample_of
from distdiag.probes.routing_calls import (
    CallMode,
    OpenCall,
    OpenCalls,
    Router,
    is_in_backward,
    routers_of,
)
from distdiag.probes.routing_mode import Chosen
from distdiag.probes.sample_rows import first_tensors, rows_of
from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import local_part
from distdiag.probes.trained_models import TrainedModels
from distdiag.recorder import Recorder
from distdiag.routing_event import Choice
from distdiag.routing_record import Ended, RouteRecord, RouteWriter, Seen
from distdiag.routing_task import RoutingTask


class RoutingRecorder(Probe):
    """Writes down every choice of experts, and what led to it."""

    name: ClassVar[str] = "routing-recorder"

    def __init__(self, recorder: Recorder, task: RoutingTask) -> None:
        """Record nothing yet."""
        super().__init__(recorder)
        self._task = task
        self._writer = RouteWriter(Path(task.folder), recorder.rank)
        self._models = TrainedModels(recorder.rank, self.fail)
        self._open = OpenCalls()
        self._routers: dict[int, Router] = {}
        self._handles: list[Any] = []
        self._calls: dict[tuple[str, bool], int] = {}
        self._step = self._micro = self._pass = self._num_choices = 0
        self._has_begun = self._has_gradients = self._is_stepped = self._is_closed = False
        self._is_in_backward = False

    def _install(self) -> None:
        if self._task.seed is not None:
            _seed(self._task.seed)
        self._models.watch(self._patches)
        self._patches.wrap_everywhere(graph, "_engine_run_backward", self._around_backward)
        modules = nn.modules.module
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(
                self._after_forward, with_kwargs=True, always_call=True
            ),
        ]

    def uninstall(self) -> None:
        """Remove the hooks."""
        super().uninstall()
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            # Torch forgets this one of its tables, and compiled modules would warn.
            nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)

    @guarded
    def flush(self) -> None:
        """Say how the recording ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_step()
        self._writer.close(
            Ended(rank=self.recorder.rank, num_steps=self._step, num_choices=self._num_choices)
        )

    # Steps

    def _end_step(self) -> None:
        """Close the step that the optimizers took since the last pass, if they did."""
        if not self._is_stepped or self._micro == 0:
            return
        self._step += 1
        self._micro = 0
        self._is_stepped = self._has_gradients = self._has_begun = False
        if self._step >= self._task.num_steps and not self._is_closed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # tells the agent, which calls `flush`

    def _begin_step(self) -> None:
        self._has_begun = True
        states = {state.name: state.digest for state in generator_states()}
        self._write(Seen.RANDOM, "generators", digests=states)
        held = {name: local_part(each.tensor) for name, each in self._models.held()}
        digests = {name: digests_of(tensor) for name, tensor in held.items()}
        self._write(Seen.WEIGHTS, "weights", digests=digests)

    def _around_backward(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            counts = kwargs.get("accumulate_grad") and not self._is_in_backward
            if self.is_off or not counts:
                return original(*args, **kwargs)
            self._before_backward()
            self._is_in_backward = True
            try:
                return original(*args, **kwargs)
            finally:
                self._is_in_backward = False
                self._micro += 1
                self._calls.clear()

        return run_backward

    @guarded
    def _before_backward(self) -> None:
        self._end_step()

    @guarded
    def _before_step(self, *_: object) -> None:
        if self._has_gradients:
            return
        self._has_gradients = True
        # A backward pass reaches the last parameters first.
        for name, held in reversed(list(self._models.held())):
            gradient = held.tensor.grad if held.plan.requires_grad else None
            if gradient is not None:
                dtype, data = sample_of(gradient)
                digests = {"returned": digests_of(gradient)}
                self._write(Seen.GRADIENT, name, data, digests=digests, dtype=dtype)

    def _after_step(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._is_stepped = True

    # Modules

    @guarded
    def _before_forward(self, module: nn.Module, args: Any) -> None:  # noqa: ANN401
        if not self._open.stack and not self._is_in_backward:
            self._end_step()
        name = self._models.name_of(module)
        if name is None:
            return
        if not self._open.stack:
            self._pass += 1
            self._routers = routers_of([root for _, root in self._models.trained()])
            if not self._has_begun:
                self._begin_step()
        is_recompute = is_in_backward()
        number = self._calls[name, is_recompute] = self._calls.get((name, is_recompute), -1) + 1
        stack, router = self._open.stack, self._routers.get(id(module))
        call = OpenCall(
            module,
            name,
            router,
            outer=stack[-1].name if stack else "",
            number=number,
            is_recompute=is_recompute,
            given={"given": digests_of(args)},
            is_meant_random=self._open.is_meant_random(name, router),
        )
        if not stack:
            call.rows = _rows(args)
        self._open.begin(call, self._mode)

    def _mode(self) -> CallMode:
        return CallMode(self._on_choice, self._on_draw, self._open.stack, self.fail)

    def _after_forward(self, module: nn.Module, _: Any, *seen: Any) -> None:  # noqa: ANN401
        if torch.compiler.is_compiling():
            return
        # Of a pass that an exception ends torch tells no keywords; repeated ones end so.
        kwargs, output = seen if len(seen) == 2 else ({}, None)
        call = None
        with guard(self.fail):
            call = self._open.end(module)  # also when the probe is off: the mode must go
        if call is not None:
            self._write_output(call, kwargs, output)

    @guarded
    def _write_output(self, call: OpenCall, kwargs: Any, output: Any) -> None:  # noqa: ANN401
        dtype, data = sample_of(output)
        more = digests_of(kwargs)
        given = "-".join(filter(None, (call.given["given"], more)))
        rows = call.rows or (_rows(kwargs) if not call.outer else ())
        digests = {"given": given, "returned": digests_of(output)}
        fields = {**self._fields(call), "digests": digests, "rows": rows, "dtype": dtype}
        self._write(Seen.OUTPUT, call.name, data, **fields)

    def _fields(self, call: OpenCall) -> dict[str, Any]:
        return {
            "call": call.number,
            "is_recompute": call.is_recompute,
            "kind": type(call.module).__name__,
            "outer": call.outer,
            "ops": tuple(call.ops),
            "is_drawn": call.is_drawn,
            "is_meant_random": call.is_meant_random,
        }

    def _on_draw(self) -> None:
        for call in (self._open.router(), *self._open.stack[-1:]):
            if call is not None:
                call.is_drawn = True

    @guarded
    def _on_choice(self, chosen: Chosen) -> None:
        call = self._open.router()
        if call is None:
            return
        if not chosen.is_sure and chosen.scores.shape[1] not in self._open.counts():
            return
        if not is_whole(chosen):
            return
        scores, indices = chosen.scores, chosen.indices
        dtype = str(scores.dtype).removeprefix("torch.")
        digests = {
            **call.given,
            "scores": digests_of(scores),
            "chosen": digests_of(indices.sort(-1).values),
        }
        fields = {
            **self._fields(call),
            "number": call.num_choices,
            "digests": digests,
            "dtype": dtype,
            "choice": Choice(chosen.api, len(scores), scores.shape[1], indices.shape[1], dtype),
        }
        call.num_choices += 1
        self._num_choices += 1
        self._write(Seen.CHOICE, call.name, choice_of(chosen), **fields)

    def _write(self, seen: Seen, name: str, data: bytes = b"", **fields: Any) -> None:  # noqa: ANN401
        fields["pass_number"] = self._pass
        self._writer.write(RouteRecord(seen, self._step, self._micro, name, **fields), data)


def _rows(value: object) -> tuple[str, ...]:
    """Return a digest of each sample that a model is given."""
    tensors = [t for t in first_tensors(value) if not is_dtensor(t)]
    if not tensors:
        return ()
    number = tensors[0].shape[0]
    return rows_of([t.cpu() for t in tensors if t.shape[0] == number], number)


def _seed(seed: int) -> None:
    """Seed the default generators; a script that seeds them itself does so afterwards."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed % 2**32)
