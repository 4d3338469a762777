"""Records one run of a parity comparison: batches, losses, gradients, parameters, outputs.

This is an active mode: a rank waits for its own device when it records, and ends after the steps
that were asked for. It never waits for another rank, and the values of the run stay what they are.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
from torch import nn
from torch.autograd import graph
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distdiag.parity_task import ParityTask, RankSummary
from distdiag.probes.base import AnyCallable, Probe, wrap_like
from distdiag.probes.batch_feed import BatchFeed, Refusal
from distdiag.probes.batch_store import bytes_of
from distdiag.probes.dropout_off import switch_dropout_off
from distdiag.probes.guard import guarded
from distdiag.probes.nudge import nudge_in_place
from distdiag.probes.out_of_sight import is_grad_enabled
from distdiag.probes.recorded_tensors import TensorRecorder
from distdiag.probes.sample_figures import coarser, figures_of
from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import Held, local_part
from distdiag.probes.trained_models import TrainedModels
from distdiag.recorder import Recorder
from distdiag.recording import Kind, Record, RecordingWriter


class ParityRecorder(Probe):
    """Writes down what is compared with another run."""

    name: ClassVar[str] = "parity"

    def __init__(self, recorder: Recorder, task: ParityTask) -> None:
        """Record nothing yet."""
        super().__init__(recorder)
        self._task = task
        self._rank = recorder.rank
        self._writer = RecordingWriter(Path(task.folder), recorder.rank)
        self._tensors = TensorRecorder(self._writer, recorder.rank)
        self._models = TrainedModels(recorder.rank, self.fail)
        self._feed = BatchFeed(task, self._models.coordinate, self._refuse)
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._micro = self._step = self._padded_at = 0
        self._num_microsteps: list[int] = []
        self._has_started = self._has_gradients = self._is_stepped = self._is_closed = False
        self._is_in_backward = False
        self._rng_at_batch = b""
        self._draws = False
        self._optimizers: list[torch.optim.Optimizer] = []
        self._compute_dtype = ""
        self._problem = ""

    def _install(self) -> None:
        self._models.watch(self._patches)
        self._feed.install(self._patches, self._writer, self._on_batch, self.fail)
        self._patches.wrap_everywhere(graph, "_engine_run_backward", self._around_backward)
        self._patches.wrap_everywhere(clip_grad, "clip_grad_norm_", self._around_clipping)
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        hook = nn.modules.module.register_module_forward_hook(self._after_forward)
        self._handles.append(hook)
        if self._task.nudge is not None:
            before = nn.modules.module.register_module_forward_pre_hook(self._before_forward)
            self._handles.append(before)
        if self._task.dropout == "off":
            switch_dropout_off(self._patches)

    def uninstall(self) -> None:
        """Remove the hooks."""
        super().uninstall()
        while self._handles:
            self._handles.pop().remove()

    @guarded
    def flush(self) -> None:
        """Write what the last step left, and the summary."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_step()
        self._writer.close(
            RankSummary(
                rank=self._rank,
                world_size=self._models.world_size,
                num_steps=self._step,
                num_batches=self._feed.num_batches,
                data_group=self._models.data_group(),
                lengths=self._feed.lengths,
                draws_in_forward=self._draws,
                num_microsteps=tuple(self._num_microsteps),
                mesh_sizes=self._models.mesh_sizes,
                devices=self._models.devices(),
                peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                compute_dtype=coarser(self._compute_dtype, self._tensors.gradient_dtype),
                unreadable=self._tensors.unreadable,
                problem=self._problem,
                padded=self._feed.padded,
                padded_at=self._padded_at,
            )
        )

    # The moments

    def _refuse(self, problem: Refusal) -> None:
        """End the run, since it cannot be given the batches that it should get."""
        self._problem = str(problem)
        self._leave()

    def _leave(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # tells the agent, which calls `flush`

    @guarded
    def _on_batch(self) -> None:
        self._end_step()
        if not self._feed.padded:
            self._padded_at = self._step
        if any(True for _ in self._models.trained()):
            self._start()
        self._rng_at_batch = _random_state()

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        if self._task.nudge is not None:
            parts = [
                local_part(held.tensor) for _, held in self._models.held() if not held.plan.tied_to
            ]
            nudge_in_place(parts, self._task.nudge, self._task.nudge_dtype)
        self._tensors.write(Kind.START, 0, self._models.held(), lambda each: each.tensor)

    def _around_backward(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            counts = kwargs.get("accumulate_grad") and not self._is_in_backward
            if self.is_off or not counts:
                return original(*args, **kwargs)
            self._is_in_backward = True
            try:
                self._before_backward(args[0] if args else ())
                result = original(*args, **kwargs)
                self._micro += 1
                self._calls.clear()
                return result
            finally:
                self._is_in_backward = False

        return run_backward

    @guarded
    def _before_backward(self, roots: Any) -> None:  # noqa: ANN401
        self._end_step()
        self._start()
        if self._rng_at_batch and _random_state() != self._rng_at_batch:
            self._draws = True
        self._rng_at_batch = b""
        losses = [local_part(root).detach() for root in roots if root.numel() == 1]
        for number, loss in enumerate(losses):
            kind = str(loss.dtype).removeprefix("torch.")
            name = f"loss#{number}" if number else "loss"
            values = (float(loss),)
            self._writer.write(
                Record(Kind.LOSS, self._step, self._micro, name, kind, values=values)
            )

    def _around_clipping(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.is_off:
                return original(*args, **kwargs)
            self._write_gradients()
            norm = original(*args, **kwargs)
            self._write_norm(norm)
            return norm

        return clip_grad_norm_

    @guarded
    def _write_norm(self, norm: object) -> None:
        if isinstance(norm, torch.Tensor) and not is_dtensor(norm):
            values = (float(norm.detach()),)
            self._writer.write(Record(Kind.NORM, self._step, 0, "norm", values=values))

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer not in self._optimizers and isinstance(optimizer, torch.optim.Optimizer):
            self._optimizers.append(optimizer)
        self._write_gradients()

    @guarded
    def _write_gradients(self) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            self._tensors.write(Kind.GRADIENT, self._step, self._models.held(), _gradient)

    def _after_step(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._is_stepped = True

    def _end_step(self) -> None:
        """Close the step that the optimizers took since the last pass, if they did."""
        if not self._is_stepped or self._micro == 0:
            return
        self._tensors.write(
            Kind.PARAMETER, self._step, self._models.held(), lambda each: each.tensor
        )
        rates = tuple(
            float(group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if "lr" in group
        )
        self._writer.write(Record(Kind.RATE, self._step, 0, "rates", values=rates))
        self._num_microsteps.append(self._micro)
        self._step += 1
        self._micro = 0
        self._is_stepped = self._has_gradients = False
        self._writer.flush()
        if self._step >= self._task.num_steps and not self._is_closed:
            self._leave()

    # Outputs

    @guarded
    def _before_forward(self, module: nn.Module, _: object) -> None:
        """Nudge before the first pass, of a script whose batches come from nowhere we see."""
        is_first = not self._has_started and module.training and is_grad_enabled()
        if is_first and self._models.name_of(module) is not None:
            self._start()

    @guarded
    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        if self._is_in_backward or not is_grad_enabled() or not module.training:
            return
        name = self._models.name_of(module)
        found = figures_of(output, self._feed.batch_size) if name is not None else None
        if name is None or found is None:
            return
        figures = found.values
        self._compute_dtype = coarser(self._compute_dtype, found.dtype)
        number = self._calls[name] = self._calls.get(name, -1) + 1
        record = Record(
            Kind.OUTPUT,
            self._step,
            self._micro,
            f"{name}#{number}",
            dtype="float32",
            shape=tuple(figures.shape),
            part=tuple(figures.shape),
            values=(found.num_elements, found.axis),
        )
        self._writer.write(record, bytes_of(figures.contiguous()))


def _gradient(held: Held) -> torch.Tensor | None:
    return held.tensor.grad if held.plan.requires_grad else None


def _random_state() -> bytes:
    state = xxhash.xxh3_64(bytes_of(torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.update(bytes_of(torch.cuda.get_rng_state()))
    return state.digest()
