"""Writes the tensors of models down in parts, each by one of the ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
import xxhash

from distdiag.model_event import Basis
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.sample_figures import coarser
from distdiag.probes.tensor_bytes import is_readable
from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import Held
from distdiag.recording import Kind, Record, RecordingWriter

_GUESSED: Final = frozenset({Basis.WORLD, Basis.LONE, Basis.MODEL})
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
        is_flat_part = held.plan.keeper in ("FSDP1", "ZeRO") and not is_dtensor(tensor)
        if place is None or not is_readable(local) or (is_flat_part and not local.numel()):
            self.unreadable[record.name] = f"a {type(tensor).__name__} whose part is not known"
            return
        shape, at, part = place
        with out_of_sight():
            local = local.detach().cpu().contiguous()
            data = _memory_of(local)
            if record.kind is Kind.GRADIENT:
                self.gradient_dtype = coarser(self.gradient_dtype, _rounded_to(local))
        replicas = held.plan.replicas
        is_known = held.plan.basis not in _GUESSED
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
            is_kept=held.plan.basis is Basis.WRAPPER and len(replicas) > 1,
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
