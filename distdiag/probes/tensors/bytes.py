"""The bytes and values of tensors, read so that nothing of the training notices it."""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

# Statistics look at so many elements at most.
SAMPLE: Final = 1 << 14

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OWN_DISPATCH: Final = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("Python", "Fake")
    if hasattr(torch._C.DispatchKey, name)
)
_NUMERIC: Final = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)


class Statistics(NamedTuple):
    """What a sample of values holds; a complex value counts as its two parts."""

    num_values: float
    num_finite: float
    least: float
    greatest: float
    total: float
    num_nan: float
    num_zero: float
    num_subnormal: float


NO_STATISTICS: Final = Statistics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes of its own on a CPU or a CUDA device, and may be read now.

    A graph that is captured would hold what is computed from tensors, whatever stream does it.
    """
    try:
        if torch.nn.parameter.is_lazy(tensor) or not _is_plain(tensor):
            return False
        if tensor.numel() == 0:
            return True
        last = tensor.storage_offset() + extent(tensor)
        is_whole = last * tensor.element_size() <= tensor.untyped_storage().nbytes()
        return is_whole and tensor.data_ptr() != 0
    except RuntimeError:
        return False  # no storage, or one that may not be looked at


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_nested
        and not tensor.is_quantized
        and not _has_own_dispatch(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and not tensor.is_conj()  # their bytes are not what the program sees
        and not tensor.is_neg()
        and not is_captured(tensor)
    )


def _has_own_dispatch(tensor: torch.Tensor) -> bool:
    keys = torch._C._dispatch_keys(tensor)
    return any(keys.has(key) for key in _OWN_DISPATCH)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is computed from a tensor now becomes a part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_numeric(tensor: torch.Tensor) -> bool:
    """Whether the values can be summed up."""
    return tensor.dtype in _NUMERIC


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as integers, which every operator can copy."""
    bits = _BITS.get(tensor.element_size())
    return tensor if bits is None else tensor.view(bits)


def extent(tensor: torch.Tensor) -> int:
    """Return how many elements of the storage lie between the first one and the last one."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def pieces(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Split a tensor, in row-major order, into what is contiguous or has few enough elements."""
    if tensor.is_contiguous() or tensor.numel() <= most:
        yield tensor
        return
    num_rows = tensor.shape[0]
    rows = most // (tensor.numel() // num_rows)
    if rows == 0:
        for row in range(num_rows):
            yield from pieces(tensor.select(0, row), most)
        return
    for start in range(0, num_rows, rows):
        yield tensor.narrow(0, start, min(rows, num_rows - start))


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced elements, the first and the last among them, in one dimension."""
    number = tensor.numel()
    if number <= SAMPLE:
        return tensor.reshape(-1)
    left = torch.arange(SAMPLE, device=tensor.device) * (number - 1) // (SAMPLE - 1)
    where = left
    if not tensor.is_contiguous():
        where = torch.zeros_like(left)
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            where += left % size * stride
            left = left // size
    everything = as_bits(tensor).as_strided((extent(tensor),), (1,))
    return everything.index_select(0, where).view(tensor.dtype)


def statistics(values: torch.Tensor) -> torch.Tensor:
    """Sum up a sample: the fields of ``Statistics``, on the device of the values."""
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    is_float = values.is_floating_point()
    least_normal = torch.finfo(values.dtype).tiny if is_float else 0.0
    number = values.numel()
    wide = values.to(torch.float64)
    size = wide.abs()
    finite = size < torch.inf
    zeros = size.count_nonzero().neg().add(number)
    counts = [
        torch.full((), number, device=wide.device),
        finite.count_nonzero(),
        (wide == wide).count_nonzero().neg().add(number),  # NaN is not itself
        zeros,
        (size < least_normal).count_nonzero().sub(zeros).clamp(min=0),
    ]
    num_values, num_finite, num_nan, num_zero, num_subnormal = torch.stack(counts).double()
    least = torch.where(finite, wide, torch.inf).amin()
    greatest = torch.where(finite, wide, -torch.inf).amax()
    total = torch.where(finite, wide, 0.0).sum()
    return torch.stack(
        [num_values, num_finite, least, greatest, total, num_nan, num_zero, num_subnormal]
    )


def quick_statistics(values: torch.Tensor) -> Statistics | None:
    """Return the same for a sample on the CPU by few operators; None if not all is finite."""
    if values.is_complex():
        return None
    wide = values.to(torch.float64)
    number = wide.numel()
    total = float(wide.sum())
    if not math.isfinite(total):
        return None
    least, greatest = (total, total) if number == 1 else map(float, torch.aminmax(wide))
    num_zero = number - int(wide.count_nonzero()) if least <= 0 <= greatest else 0
    num_subnormal = 0
    least_normal = torch.finfo(values.dtype).tiny if values.is_floating_point() else 0.0
    if least < least_normal and greatest > -least_normal:
        num_subnormal = int((wide.abs() < least_normal).count_nonzero()) - num_zero
    return Statistics(number, number, least, greatest, total, 0, num_zero, num_subnormal)
