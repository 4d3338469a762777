"""The models that a program trains, under names that do not tell how they are wrapped."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import graph
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distdiag.probes.base import AnyCallable, Patches, Probe, wrap_like
from distdiag.probes.models.modules import clean_name
from distdiag.probes.models.registry import LiveModels, class_of, roots_of
from distdiag.probes.models.tensor_plans import Held, Surroundings, plan_of
from distdiag.probes.models.wrappers import WrapTimes, unwrapped, walk
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder


class TrainedModels:
    """Knows the models with trainable parameters, and how they are spread over the ranks."""

    def __init__(self, rank: int, fail: Callable[[Exception], None]) -> None:
        """Know of none yet; `fail` gets what goes wrong here."""
        self._rank = rank
        self._fail = fail
        self._modules = LiveModels()
        self._names: dict[int, tuple[nn.Module, str]] = {}
        self._num_named = -1
        self._world_size = 1
        self.mesh_sizes: dict[str, int] = {}
        """The sizes of the axes on which parameters were seen, by name."""

    def watch(self, patches: Patches) -> None:
        """Take note of each module that is made from now on."""
        self._modules.watch(patches, self._fail)

    def trained(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models with trainable parameters under names that do not tell wrappers."""
        numbers: dict[str, int] = {}
        for root in roots_of(self._modules.alive()):
            if any(parameter.requires_grad for parameter in root.parameters()):
                kind = class_of(root)
                number = numbers[kind] = numbers.get(kind, 0) + 1
                yield kind if number == 1 else f"{kind}#{number}", root

    @property
    def world_size(self) -> int:
        """How many ranks there are, or were before the script destroyed their group."""
        if dist.is_initialized():
            self._world_size = dist.get_world_size()
        return self._world_size

    def held(self) -> Iterator[tuple[str, Held]]:
        """Yield all tensors of these models under the names of both."""
        around = Surroundings({}, {}, {}, (), tuple(range(self.world_size)), WrapTimes())
        for model, root in self.trained():
            for each in plan_of(list(walk(root)), around):
                if each.plan.mesh is not None:
                    sizes = zip(each.plan.mesh.names, each.plan.mesh.sizes, strict=True)
                    self.mesh_sizes.update(sizes)
                yield f"{model}/{each.plan.name}", each

    def data_group(self) -> tuple[int, ...]:
        """Return the ranks that a wrapper feeds with different data; empty if none tells."""
        for _, root in self.trained():
            for _, _, wrapper in walk(root):
                if wrapper.ranks:
                    return wrapper.ranks
        return ()

    def devices(self) -> tuple[str, ...]:
        """Return the kinds of devices that the program uses."""
        found = {p.device.type for _, root in self.trained() for p in root.parameters()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found.add("cuda")
        return tuple(sorted(found))

    def coordinate(self) -> tuple[int, int]:
        """Return the data coordinate of this rank, and how many there are."""
        group = self.data_group()
        if self._rank in group:
            return group.index(self._rank), len(group)
        is_sharded = any(held.plan.mesh is not None for _, held in self.held())
        if is_sharded or self.world_size == 1:
            return 0, 1  # the parts of one model see the same samples
        return self._rank, self.world_size

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of a part of these models; None if it is no part of any."""
        if self._num_named != self._modules.count:
            self._num_named = self._modules.count
            self._names = {
                id(part): (part, f"{model}/{clean_name(name)}")
                for model, root in self.trained()
                for name, part in unwrapped(root).named_modules()
            }
        known = self._names.get(id(module))
        return known[1] if known is not None else None


Given: TypeAlias = tuple[Any, ...]
More: TypeAlias = dict[str, Any]
"""The arguments of a step."""
_CREATES_GRAPH, _INPUTS = 3, 4
"""Which arguments of torch's backward pass say so: see `torch.autograd.grad`."""


class TrainingRecorder(Probe):
    """Counts backward passes and steps of a program, and ends it after so many steps."""

    def __init__(self, recorder: Recorder, num_steps: int) -> None:
        super().__init__(recorder)
        self._models = TrainedModels(recorder.rank, self.fail)
        self._num_steps = num_steps
        self._calls: dict[Hashable, int] = {}
        """What was called how often since the last backward pass."""
        self._step = self._micro = 0
        self._has_gradients = self._is_stepped = self._is_closed = self._is_in_backward = False

    def _install(self) -> None:
        self._models.watch(self._patches)
        self._patches.wrap_everywhere(graph, "_engine_run_backward", self._around_backward)
        self._to_undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        self._to_undo.append(register_optimizer_step_post_hook(self._after_step).remove)

    @abstractmethod
    def _before_backward(self, roots: Untyped) -> bool | None:
        """Look at what a backward pass begins with, guarded; return whether it counts."""

    @abstractmethod
    def _before_step(
        self, optimizer: torch.optim.Optimizer, given: Given, more: More, /
    ) -> tuple[Given, More] | None:
        """Look at the gradients with which an optimizer steps; it is guarded.

        Return other arguments for the step, or None.
        """

    @abstractmethod
    def _write_step(self) -> None:
        """Write down what a step has left."""

    def _around_backward(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def run_backward(*args: object, **kwargs: object) -> object:
            if self.is_off or self._is_in_backward or not self._trains(*args, **kwargs):
                return original(*args, **kwargs)
            self._is_in_backward = True
            try:
                is_pass = self._before_backward(args[0] if args else ())
                result = original(*args, **kwargs)
                if is_pass:
                    self._micro += 1
                    self._calls.clear()
                return result
            finally:
                self._is_in_backward = False

        return run_backward

    def _trains(self, *args: Untyped, accumulate_grad: Untyped = False, **_: Untyped) -> bool:
        """Say whether a pass is one of training, of which the program may put gradients in place.

        A function that returns the gradients of all that a model trains is one, unless they are
        derived once more.
        """
        if accumulate_grad or len(args) <= _INPUTS or args[_CREATES_GRAPH]:
            return bool(accumulate_grad)
        given = {id(each) for each in args[_INPUTS] if isinstance(each, nn.Parameter)}
        return bool(given) and any(
            all(id(each) in given for each in root.parameters() if each.requires_grad)
            for _, root in self._models.trained()
        )

    def _after_step(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._is_stepped = True

    def _end_step(self) -> None:
        """Close the step that the optimizers took since the last pass, if they did."""
        if not self._is_stepped or self._micro == 0:
            return
        self._write_step()
        self._step += 1
        self._micro = 0
        self._is_stepped = self._has_gradients = False
        if self._step >= self._num_steps and not self._is_closed:
            self._leave()

    def _leave(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # tells the agent, which calls `flush`
