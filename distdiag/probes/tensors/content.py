"""What tensors hold: a digest of the bytes and a summary of the values, read without a wait."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import xxhash

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import (
    NO_STATISTICS,
    Statistics,
    as_bits,
    is_numeric,
    is_readable,
    pieces,
    quick_statistics,
    sample,
    statistics,
)

if TYPE_CHECKING:
    from distdiag.probes.tensors.cuda_digest import CudaDigests

# What is copied at a time of a tensor that is not contiguous.
_BLOCK_BYTES: Final = 1 << 20

_view_memory: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_READ_ONLY: Final = 0x100


class Content(NamedTuple):
    """What a tensor held at one moment.

    ``digest`` is of the bytes in row-major order: equal for equal bytes whatever the strides and
    the type, different for permuted ones. It is a letter and 32 hexadecimal digits; digests made
    on a CPU (``c``) and on a GPU (``g``) are different functions, so the letter tells them apart.

    The other fields come from at most 16,384 evenly spaced elements, always with the first and
    the last one: exact for tensors up to that size, a sample of larger ones (the digest is always
    of all bytes). ``least``, ``greatest`` and ``mean`` are over finite values, NaN if there are
    none or they are no numbers. A complex number counts as its two parts.
    """

    digest: str
    num_elements: int
    least: float
    greatest: float
    mean: float
    nan_share: float
    zero_share: float
    subnormal_share: float


class Pending:
    """Contents that a device may still be reading."""

    def __init__(
        self, known: list[Content | None], parts: Iterable[tuple[CudaDigests, list[int]]] = ()
    ) -> None:
        self._contents = known
        self._parts = list(parts)

    def take(self) -> list[Content | None] | None:
        """Return the contents in the order of the tensors, None if they are not there yet.

        It never waits. An item is None where a tensor has no content that can be read: meta, fake,
        sparse, nested, quantized, without memory, a lazily conjugated view, or a subclass with a
        dispatch of its own.
        """
        if not all(reader.is_ready() for reader, _ in self._parts):
            return None
        for reader, indices in self._parts:
            for index, result in zip(indices, reader.results(), strict=True):
                self._contents[index] = _content(*result)
        self._parts.clear()
        return list(self._contents)

    def guard(self) -> None:
        """Make the current CUDA streams wait, before the next write, until all has been read."""
        for reader, _ in self._parts:
            reader.guard()

    def wait(self) -> list[Content | None]:
        """Wait on the host for the contents (at the end of a run)."""
        for reader, _ in self._parts:
            reader.wait()
        taken = self.take()
        assert taken is not None
        return taken


def contents(tensors: Sequence[torch.Tensor]) -> Pending:
    """Read what tensors hold: at once on a CPU, beside the current stream on CUDA devices.

    The memory of tensors on CUDA devices is not reused before they are read; whoever writes to them
    next calls ``guard`` first. While a CUDA graph is captured they have no content.
    """
    with out_of_sight():
        known: list[Content | None] = [None] * len(tensors)
        on_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if not is_readable(tensor):
                continue
            if tensor.device.type == "cuda":
                on_device.setdefault(tensor.device, []).append(index)
            else:
                known[index] = _read(tensor)
        parts: list[tuple[CudaDigests, list[int]]] = []
        if on_device:
            from distdiag.probes.tensors.cuda_digest import start

            for device, indices in on_device.items():
                reader = start(device, [tensors[index].detach() for index in indices])
                if reader is not None:
                    parts.append((reader, indices))
        return Pending(known, parts)


def _read(tensor: torch.Tensor) -> Content:
    state = xxhash.xxh3_128()
    number = tensor.numel()
    if number:
        for piece in pieces(as_bits(tensor), _BLOCK_BYTES // tensor.element_size()):
            flat = piece.contiguous()
            state.update(_view_memory(flat.data_ptr(), flat.nbytes, _READ_ONLY))
    values = NO_STATISTICS
    if number and is_numeric(tensor):
        taken = sample(tensor)
        values = quick_statistics(taken) or Statistics(*statistics(taken).tolist())
    return _content(f"c{state.hexdigest()}", number, values)


def _content(digest: str, num_elements: int, values: Statistics) -> Content:
    is_known = values.num_finite > 0
    number = max(values.num_values, 1.0)
    return Content(
        digest,
        num_elements,
        values.least if is_known else math.nan,
        values.greatest if is_known else math.nan,
        values.total / values.num_finite if is_known else math.nan,
        values.num_nan / number,
        values.num_zero / number,
        values.num_subnormal / number,
    )
