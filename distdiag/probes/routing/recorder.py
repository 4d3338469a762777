"""Records how a run routes, for a comparison with the same run again.

This is an active mode: a rank waits for its own device when it records, and ends after the steps
that were asked for. It never waits for another rank, and the values of the run stay what they are.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from distdiag.config.tasks import RoutingTask
from distdiag.events.routing import Choice
from distdiag.probes.generators import generator_states
from distdiag.probes.guard import guard, guarded
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.models.trained_models import TrainingRecorder
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.parity.batches import bytes_of
from distdiag.probes.routing.mode import Chosen, RoutingMode
from distdiag.probes.routing.modules import expert_counts, is_meant_random, routing_modules
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import contents
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.tensors.sample_rows import first_tensors, rows_of, tensors_in
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.recording import Ended, RouteRecord, Seen
from distdiag.record.recording import RecordingWriter as RouteWriter
from distdiag.record.unordered_ops import BACKWARD, FORWARD

# The arrays that a recording of routing keeps: choices with their margins, samples of outputs.

MOST_SAMPLED: Final = 1024
_MOST_TENSORS: Final = 64


def digests_of(value: object) -> str:
    """Return one digest of all tensors in a value, empty if there are none that can be read.

    It waits for the device.
    """
    tensors = [local_part(t).detach() for t in islice(tensors_in(value), _MOST_TENSORS)]
    found = contents(tensors).wait() if tensors else []
    return "-".join(content.digest for content in found if content is not None)


def sample_of(value: object) -> tuple[str, bytes]:
    """Return the dtype of the first floating-point tensor in a value, and some of its numbers."""
    for each in tensors_in(value):
        tensor = local_part(each).detach()
        if not tensor.is_floating_point() or not tensor.numel() or not is_readable(tensor):
            continue
        with out_of_sight():
            flat = tensor.reshape(-1)
            some = flat[:: max(1, -(-flat.numel() // MOST_SAMPLED))]
            return _dtype(tensor), bytes_of(some.float().cpu().contiguous())
    return "", b""


def choice_of(chosen: Chosen) -> bytes:
    """Return the chosen indices and, for each token, the scores at the boundary and the greatest.

    The first score that was not chosen is minus infinity where there is none.
    """
    with out_of_sight():
        k = chosen.indices.shape[1]
        scores, indices = chosen.scores.detach(), chosen.indices.detach()
        wide = scores.double()
        best = wide.topk(min(k + 1, wide.shape[1]), -1).values
        inner = best[:, k - 1]
        outer = best[:, k] if best.shape[1] > k else torch.full_like(inner, -torch.inf)
        size = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(-1)
        parts = (indices.int(), inner, outer, size)
        return b"".join(bytes_of(part.contiguous().cpu()) for part in parts)


def is_whole(chosen: Chosen) -> bool:
    """Say whether a choice can be recorded: of tokens, out of plain numbers."""
    scores, indices = chosen.scores, chosen.indices
    is_plain = is_readable(scores) and is_readable(indices) and not is_dtensor(scores)
    return is_plain and len(scores) > 0 and 0 < indices.shape[1] <= scores.shape[1]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# The forward passes of modules that are going on, and what the calls of torch in them are.

_NAMES: Final = FORWARD | BACKWARD
_DROPOUTS: Final = frozenset(
    ("dropout", "dropout_", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
)


@dataclass(frozen=True, slots=True)
class Router:
    """What a module that may route says of itself."""

    counts: frozenset[int]
    is_meant_random: bool


@dataclass(slots=True)
class OpenCall:
    """A forward pass of a module that has begun."""

    module: nn.Module
    name: str
    router: Router | None
    outer: str
    number: int
    is_recompute: bool
    given: dict[str, str]
    is_meant_random: bool
    rows: tuple[str, ...] = ()
    num_choices: int = 0
    ops: dict[str, None] = field(default_factory=dict)
    is_drawn: bool = False


class CallMode(RoutingMode):
    """Tells, besides what `RoutingMode` tells, of calls whose result may be another one again."""

    def __init__(
        self,
        on_choice: Callable[..., None],
        on_draw: Callable[[], None],
        stack: list[OpenCall],
        fail: Callable[[Exception], None],
    ) -> None:
        """Tell these, and note calls in the innermost of the `stack`."""
        super().__init__(on_choice, on_draw, lambda _: None, fail=fail)
        self._stack = stack

    def __torch_function__(
        self,
        func: object,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _NAMES and self._stack:
            self._stack[-1].ops[name] = None
        elif name in _DROPOUTS:
            self._on_draw()
        return super().__torch_function__(func, types, args, kwargs)


class OpenCalls(threading.local):
    """The calls that a thread is in the middle of, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[OpenCall] = []
        self.mode: CallMode | None = None

    def begin(self, call: OpenCall, make: Callable[[], CallMode]) -> None:
        """Enter a call; the mode is there within the outermost one."""
        self.stack.append(call)
        if self.mode is None:
            self.mode = make()
            self.mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module) -> OpenCall | None:
        """Leave the call of a module, and those within it that never said so."""
        found = None
        if any(call.module is module for call in self.stack):
            while found is None or found.module is not module:
                found = self.stack.pop()
        if not self.stack and self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return found

    def router(self) -> OpenCall | None:
        """Return the innermost call of a module that may route."""
        return next((call for call in reversed(self.stack) if call.router is not None), None)

    def counts(self) -> frozenset[int]:
        """Return how many experts there may be, by what the modules around say."""
        routers = (call.router for call in self.stack if call.router is not None)
        return frozenset().union(*(router.counts for router in routers))

    def is_meant_random(self, name: str, router: Router | None) -> bool:
        """Say whether the options of a router, or of the module that it belongs to, ask for it."""
        if router is None or not self.stack:
            return router is not None and router.is_meant_random
        around = self.stack[-1]
        is_part = name.rpartition(".")[0] == around.name
        return router.is_meant_random or (is_part and around.is_meant_random)


def routers_of(roots: list[nn.Module]) -> dict[int, Router]:
    """Return the modules of these models that may route, by their ids."""
    return {
        id(module): Router(expert_counts(module), is_meant_random(module))
        for root in roots
        for _, module in routing_modules(root)
    }


def is_in_backward() -> bool:
    """Say whether this thread runs a backward pass, so that a forward pass is a repeated one."""
    return bool(torch._C._current_graph_task_id() != -1)


# The probe.


class RoutingRecorder(TrainingRecorder):
    """Writes down every choice of experts, and what led to it."""

    name: ClassVar[str] = "routing-recorder"

    def __init__(self, recorder: Recorder, task: RoutingTask) -> None:
        super().__init__(recorder, task.num_steps)
        self._task = task
        self._writer = RouteWriter(Path(task.folder), recorder.rank)
        self._open = OpenCalls()
        self._routers: dict[int, Router] = {}
        self._pass = self._num_choices = 0
        self._has_begun = False

    def _install(self) -> None:
        if self._task.seed is not None:
            _seed(self._task.seed)
        super()._install()
        modules = nn.modules.module
        before = modules.register_module_forward_pre_hook(self._before_forward)
        after = modules.register_module_forward_hook(
            self._after_forward, with_kwargs=True, always_call=True
        )
        # Torch forgets this one of its tables, and compiled modules would warn.
        forgotten = partial(modules._global_forward_hooks_with_kwargs.pop, after.id, None)
        self._to_undo += [before.remove, forgotten, after.remove]

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

    def _write_step(self) -> None:
        self._has_begun = False

    def _begin_step(self) -> None:
        self._has_begun = True
        states = {state.name: state.digest for state in generator_states()}
        self._write(Seen.RANDOM, "generators", digests=states)
        held = {name: local_part(each.tensor) for name, each in self._models.held()}
        digests = {name: digests_of(tensor) for name, tensor in held.items()}
        self._write(Seen.WEIGHTS, "weights", digests=digests)

    @guarded
    def _before_backward(self, _: object) -> bool:
        self._end_step()
        return True

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

    # Modules

    @guarded
    def _before_forward(self, module: nn.Module, args: object) -> None:
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

    def _after_forward(self, module: nn.Module, _: object, *seen: object) -> None:
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
    def _write_output(self, call: OpenCall, kwargs: object, output: object) -> None:
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

    def _write(self, seen: Seen, name: str, data: bytes = b"", **fields: Untyped) -> None:
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
