"""Records one run of a parity comparison: batches, losses, gradients, parameters, outputs.

This is an active mode: a rank waits for its own device when it records, and ends after the steps
that were asked for. It never waits for another rank, and the values of the run stay what they are.
"""

from __future__ import annotations

import inspect
import resource
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

import msgspec
import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad

from distdiag.config.tasks import ParityTask, RankSummary
from distdiag.events.base import Frame
from distdiag.events.models import ReplicaEvidence
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.guard import guarded
from distdiag.probes.models.tensor_plans import Held, local_part
from distdiag.probes.models.trained_models import Given, More, TrainingRecorder
from distdiag.probes.models.wrappers import is_training
from distdiag.probes.out_of_sight import is_grad_enabled, out_of_sight
from distdiag.probes.parity.batches import BatchFeed, Refusal, bytes_of
from distdiag.probes.parity.functions import Functions
from distdiag.probes.parity.perturbation import perturb_in_place
from distdiag.probes.parity.sample_figures import Figures, coarser, figures_of
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.recording import Kind, Record, RecordingWriter

# Switches dropout off, so that runs on different numbers of ranks can be compared.

_NAMES: Final = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)


def switch_dropout_off(patches: Patches) -> None:
    """Let the functions that drop return what they are given."""
    for name in _NAMES:
        patches.wrap(functional, name, _keeping)
    patches.wrap(torch, "dropout", _keeping)
    patches.wrap(functional, "scaled_dot_product_attention", _without_dropout)


def _keeping(original: AnyCallable) -> AnyCallable:
    @wrap_like(original)
    def keep(*args: object, **kwargs: object) -> object:
        return args[0] if args else kwargs["input"]

    return keep


def _without_dropout(original: AnyCallable) -> AnyCallable:
    @wrap_like(original)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: object,
    ) -> object:
        return original(query, key, value, attn_mask, 0.0, is_causal, **more)

    return attention


# Writes the tensors of models down in parts, each by one of the ranks that hold it.

_GUESSED: Final = frozenset({ReplicaEvidence.WORLD, ReplicaEvidence.LONE, ReplicaEvidence.MODEL})
"""Each rank may hold something of its own, such as other experts, so all of them write it."""
_FEWEST: Final = 16
_LEAST_FULL: Final = 0.2
"""Of numbers that were rounded to a dtype, half have its last bit set."""
_LOST_BITS: Final = {"bfloat16": 0xFFFF, "float16": 0x1FFF}


class TensorRecorder:
    """Records what one rank holds of the tensors of its models."""

    def __init__(self, writer: RecordingWriter, rank: int) -> None:
        """Write to this recording; `unreadable` collects what could not be read, with why."""
        self._writer = writer
        self._rank = rank
        self.unreadable: dict[str, str] = {}
        self.gradient_dtype = ""
        """The coarsest dtype that all elements of a gradient were rounded to."""

    def write(
        self,
        kind: Kind,
        step: int,
        held: Iterable[tuple[str, Held]],
        pick: Callable[[Held], torch.Tensor | None],
    ) -> None:
        """Record what `pick` returns for each parameter."""
        for name, each in held:
            if each.plan.is_parameter and not each.plan.tied_to:
                tensor = pick(each)
                if tensor is not None:
                    self._write_one(Record(kind, step, 0, name), each, tensor)

    def _write_one(self, record: Record, held: Held, tensor: torch.Tensor) -> None:
        place = _place(tensor)
        local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
        is_flat_part = held.plan.wrapper in ("FSDP1", "ZeRO") and not is_dtensor(tensor)
        if place is None or not is_readable(local) or (is_flat_part and not local.numel()):
            self.unreadable[record.name] = f"a {type(tensor).__name__} whose part is not known"
            return
        shape, at, part = place
        with out_of_sight():
            local = local.detach().cpu().contiguous()
            if held.plan.wrapper == "FSDP1":
                local = local.clone()  # numpy would pin the storage, which FSDP1 resizes
            data = _memory_of(local)
            if record.kind is Kind.GRADIENT:
                self.gradient_dtype = coarser(self.gradient_dtype, _rounded_to(local))
        replicas = held.plan.replicas
        is_known = held.plan.evidence not in _GUESSED
        is_writer = not (is_known and replicas) or self._rank == min(replicas)
        record = Record(
            record.kind,
            record.step,
            record.micro,
            record.name,
            dtype=str(local.dtype).removeprefix("torch."),
            shape=shape,
            at=at,
            part=part,
            digest=xxhash.xxh3_128_hexdigest(data),
            is_kept=held.plan.evidence is ReplicaEvidence.WRAPPER and len(replicas) > 1,
            among=held.plan.mesh.ranks if held.plan.mesh is not None else (),
        )
        self._writer.write(record, data if is_writer else b"")


def _memory_of(tensor: torch.Tensor) -> bytes | memoryview:
    """Return the bytes of a contiguous tensor on the CPU without a copy of them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def _rounded_to(tensor: torch.Tensor) -> str:
    """Return the coarse dtype that all elements of a float32 tensor fit into, empty if none does.

    Mixed precision and compressed communication leave their marks so. What is left of sums that
    cancel out are small multiples of one unit, which fit too, but hardly ever need the last bit.
    """
    num_nonzero = int(tensor.count_nonzero())
    if tensor.dtype is not torch.float32 or num_nonzero < _FEWEST:
        return ""
    bits = tensor.view(torch.int32)
    for dtype, mask in _LOST_BITS.items():
        if not bool((bits & mask).any()):
            num_full = int((bits & (mask + 1)).count_nonzero())
            return dtype if num_full >= _LEAST_FULL * num_nonzero else ""
    return ""


def _place(
    tensor: torch.Tensor,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape of the whole, where this rank's part begins, and the shape of the part."""
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return shape, (0,) * len(shape), shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        return None
    part, at = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = tuple(tensor._local_tensor.shape)  # type: ignore[attr-defined]
    return (shape, tuple(at), local) if tuple(part) == local else None


# The probe.


class ParityRecorder(TrainingRecorder):
    """Writes down what is compared with another run."""

    name: ClassVar[str] = "parity"

    def __init__(self, recorder: Recorder, task: ParityTask) -> None:
        super().__init__(recorder, task.num_steps)
        self._task = task
        self._rank = recorder.rank
        self._writer = RecordingWriter(Path(task.folder), recorder.rank)
        self._tensors = TensorRecorder(self._writer, recorder.rank)
        self._feed = BatchFeed(task, self._models.coordinate, self._refuse)
        self._padded_at = 0
        self._num_microsteps: list[int] = []
        self._has_started = False
        self._thread = 0
        """The one that runs the script, and trains."""
        self._rng_at_batch = b""
        self._draws = False
        self._functions = Functions(recorder.main_script, self._after_function, self._takes_part)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._optimizer_of: dict[str, str] = {}
        self._optimizer_sites: dict[str, Frame] = {}
        self._part_sites: dict[str, Frame] = {}
        self._stepping = ""
        self._compute_dtype = ""
        self._problem = ""

    def _install(self) -> None:
        super()._install()
        self._thread = threading.get_ident()
        self._feed.install(self._patches, self._writer, self._on_batch, self.fail)
        self._patches.wrap_everywhere(clip_grad, "clip_grad_norm_", self._around_clipping)
        self._patches.wrap(torch.optim.Optimizer, "__init__", self._making_optimizer)
        hook = nn.modules.module.register_module_forward_hook(self._after_forward)
        self._to_undo.append(hook.remove)
        before = nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        self._to_undo.append(before.remove)
        if self._task.dropout == "off":
            switch_dropout_off(self._patches)

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
                num_given=self._feed.num_given,
                data_group=self._models.data_group(),
                lengths=self._feed.lengths,
                iterators=self._feed.iterators,
                trained=tuple(sorted(self._feed.trained)),
                exhausted=tuple(sorted(self._feed.exhausted)),
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
                is_filled=self._feed.is_filled,
                optimizers=self._optimizer_of,
                optimizer_sites={**self._optimizer_sites, **self._part_sites},
            )
        )

    # The moments

    def _making_optimizer(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def init(*args: object, **kwargs: object) -> None:
            original(*args, **kwargs)
            if self._rng_at_batch:
                self._rng_at_batch = _random_state()  # what was drawn before are weights

        return init

    def _refuse(self, problem: Refusal) -> None:
        """End the run, since it cannot be given the batches that it should get."""
        self._problem = str(problem)
        self._leave()

    @guarded
    def _on_batch(self) -> None:
        if threading.get_ident() != self._thread:
            return  # what a thread fetches ahead comes at any moment of a step
        self._end_step()
        if not self._feed.padded:
            self._padded_at = self._step
        if any(True for _ in self._models.trained()):
            self._start()
        self._rng_at_batch = _random_state()
        self._functions.watch_returns()

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        if self._task.perturbation is not None:
            parts = [
                local_part(held.tensor) for _, held in self._models.held() if not held.plan.tied_to
            ]
            perturb_in_place(parts, self._task.perturbation, self._task.perturbation_dtype)
        self._tensors.write(Kind.START, 0, self._models.held(), lambda each: each.tensor)

    @guarded
    def _before_backward(self, roots: Untyped) -> bool:
        """Record the losses; return False of a pass over what has no values (fake tensors)."""
        self._functions.stop()
        readable = [root for root in roots if is_readable(local_part(root))]
        if not readable:
            return False
        self._end_step()
        self._start()
        self._feed.note_backward()
        if self._rng_at_batch and _random_state() != self._rng_at_batch:
            self._draws = True
        self._rng_at_batch = b""
        losses = [local_part(root).detach() for root in readable if root.numel() == 1]
        for number, loss in enumerate(losses):
            kind = str(loss.dtype).removeprefix("torch.")
            name = f"loss#{number}" if number else "loss"
            values = (float(loss),)
            self._writer.write(
                Record(Kind.LOSS, self._step, self._micro, name, kind, values=values)
            )
        return True

    def _around_clipping(self, original: AnyCallable) -> AnyCallable:
        @wrap_like(original)
        def clip_grad_norm_(*args: object, **kwargs: object) -> object:
            if self.is_off:
                return original(*args, **kwargs)
            self._write_gradients()
            norm = original(*args, **kwargs)
            self._write_norm(norm)
            return norm

        return clip_grad_norm_

    @guarded
    def _write_norm(self, norm: object) -> None:
        if isinstance(norm, torch.Tensor) and not is_dtensor(norm) and is_readable(norm):
            values = (float(norm.detach()),)
            self._writer.write(Record(Kind.NORM, self._step, 0, "norm", values=values))

    @guarded
    def _before_step(
        self, optimizer: torch.optim.Optimizer, given: Given, more: More, /
    ) -> tuple[Given, More] | None:
        if optimizer not in self._optimizers and isinstance(optimizer, torch.optim.Optimizer):
            self._optimizers.append(optimizer)
        self._stepping = type(optimizer).__name__
        self._note_step(optimizer)
        self._functions.watch_parts()
        closure = given[1] if len(given) > 1 else more.get("closure")
        if not callable(closure):
            self._write_gradients()
            return None

        def compute() -> object:
            loss = closure()
            self._write_gradients()  # by the first call: others are made with other parameters
            return loss

        return (optimizer,), {**more, "closure": compute}

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer of each parameter, and where the step of a class of the program is."""
        held = {id(each.tensor): name for name, each in self._models.held()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in held:
                    self._optimizer_of[held[id(parameter)]] = self._stepping
        step = inspect.unwrap(type(optimizer).step)
        code = getattr(step, "__code__", None)
        if code is not None and self._functions.is_of_program(code):
            site = Frame(code.co_filename, code.co_firstlineno, code.co_name)
            self._optimizer_sites.setdefault(self._stepping, site)

    def _after_step(self, *args: object) -> None:
        self._functions.stop()
        super()._after_step(*args)

    @guarded
    def _takes_part(self, frame: FrameType) -> None:
        self._part_sites.setdefault(self._stepping, _site_of(frame))

    @guarded
    def _write_gradients(self) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            self._tensors.write(Kind.GRADIENT, self._step, self._models.held(), _gradient)

    def _write_step(self) -> None:
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
        self._writer.flush()

    # Outputs

    @guarded
    def _before_forward(self, module: nn.Module, given: tuple[object, ...]) -> None:
        """Begin before the first pass, of a script whose batches come from nowhere we see."""
        if not is_grad_enabled():
            self._feed.note_evaluation()
        has_batches = self._feed.num_batches > 0
        is_begun = has_batches and (self._has_started or self._task.perturbation is None)
        if is_begun or not is_training(module) or not is_grad_enabled():
            return
        name = self._models.name_of(module)
        if name is None:
            return
        if self._task.perturbation is not None and not self._has_started:
            self._start()
        if name.endswith("/") and not has_batches:
            self._end_step()
            self._feed.note_given(name, given)
            self._functions.watch_returns()

    @guarded
    def _after_function(self, name: str, output: object, frame: FrameType) -> None:
        if not is_grad_enabled():
            return
        found = figures_of(output, self._feed.batch_size)
        if found is not None:
            number = self._calls[name, "()"] = self._calls.get((name, "()"), -1) + 1
            record = Record(
                Kind.FUNCTION, self._step, self._micro, f"{name}()#{number}", site=_site_of(frame)
            )
            self._write_figures(record, found)

    @guarded
    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        if self._is_in_backward or not is_grad_enabled() or not is_training(module):
            return
        name = self._models.name_of(module)
        found = figures_of(output, self._feed.batch_size) if name is not None else None
        if name is None or found is None:
            return
        self._compute_dtype = coarser(self._compute_dtype, found.dtype)
        number = self._calls[name] = self._calls.get(name, -1) + 1
        record = Record(Kind.OUTPUT, self._step, self._micro, f"{name}#{number}")
        self._write_figures(record, found)

    def _write_figures(self, record: Record, found: Figures) -> None:
        figures = found.values
        record = msgspec.structs.replace(
            record,
            dtype="float32",
            shape=tuple(figures.shape),
            part=tuple(figures.shape),
            values=(found.num_elements, found.axis),
        )
        self._writer.write(record, bytes_of(figures.contiguous()))


def _site_of(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _gradient(held: Held) -> torch.Tensor | None:
    return held.tensor.grad if held.plan.requires_grad else None


def _random_state() -> bytes:
    state = xxhash.xxh3_64(bytes_of(torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.update(bytes_of(torch.cuda.get_rng_state()))
    return state.digest()
