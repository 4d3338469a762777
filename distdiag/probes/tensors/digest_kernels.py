"""The kernels that read tensors on a CUDA device, in Triton; nothing else here loads it.

They do what ``digest_arithmetic`` says.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from distdiag.probes.tensors.bytes import SAMPLE
from distdiag.probes.tensors.digest_arithmetic import CONSTANTS

# No types come with Triton, and it need not be installed.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_STATISTICS_BLOCK: Final = 1024
# As which type values and their bits are read, and how many bits the mantissa has.
_KINDS: Final = {
    torch.float16: (tl.float16, tl.int16, 10),
    torch.bfloat16: (tl.bfloat16, tl.int16, 7),
    torch.float32: (tl.float32, tl.int32, 23),
    torch.float64: (tl.float64, tl.int64, 52),
    torch.bool: (tl.uint8, tl.uint8, 0),
    torch.uint8: (tl.uint8, tl.uint8, 0),
    torch.int8: (tl.int8, tl.int8, 0),
    torch.int16: (tl.int16, tl.int16, 0),
    torch.int32: (tl.int32, tl.int32, 0),
    torch.int64: (tl.int64, tl.int64, 0),
}
# A complex number is read as its two parts.
_PARTS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}
SUMMED_UP: Final = frozenset((*_KINDS, *_PARTS))


@triton.jit  # type: ignore[untyped-decorator]
def _scramble(value: tl.tensor) -> tl.tensor:
    value = value ^ (value >> 33)
    value = value * 0xFF51AFD7ED558CCD
    value = value ^ (value >> 33)
    value = value * 0xC4CEB9FE1A85EC53
    return value ^ (value >> 33)


@triton.jit  # type: ignore[untyped-decorator]
def _hash_items(  # noqa: PLR0913 (what a compiler must know are arguments)
    items: tl.tensor,
    sums: tl.tensor,
    ALIGNMENT: tl.constexpr,
    LANES: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    PLACE: tl.constexpr,
) -> None:
    which = tl.program_id(0)
    address = tl.load(items + which * 4)
    num_bytes = tl.load(items + which * 4 + 1).to(tl.int32)
    number = tl.load(items + which * 4 + 2)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), ALIGNMENT)
    lanes = tl.arange(0, LANES)
    first = tl.zeros([LANES], dtype=tl.uint64)
    second = tl.zeros([LANES], dtype=tl.uint64)
    num_rows = num_bytes // (LANES * 4)
    num_fours = num_rows // 4
    for four in range(num_fours):
        # Four loads before the arithmetic: memory is far, and there is not enough else to do.
        start = words + four * 4 * LANES + lanes
        a = tl.load(start)
        b = tl.load(start + LANES)
        c = tl.load(start + 2 * LANES)
        d = tl.load(start + 3 * LANES)
        first = (first * FIRST + a.to(tl.uint64)) * FIRST + b.to(tl.uint64)
        first = (first * FIRST + c.to(tl.uint64)) * FIRST + d.to(tl.uint64)
        second = (second * SECOND + a.to(tl.uint64)) * SECOND + b.to(tl.uint64)
        second = (second * SECOND + c.to(tl.uint64)) * SECOND + d.to(tl.uint64)
    for row in range(num_fours * 4, num_rows):
        word = tl.load(words + row * LANES + lanes).to(tl.uint64)
        first = first * FIRST + word
        second = second * SECOND + word
    left = num_bytes - num_rows * LANES * 4 - lanes * 4
    if num_bytes > num_rows * LANES * 4:
        # The last word may reach beyond the tensor, never beyond its aligned four bytes.
        word = tl.load(words + num_rows * LANES + lanes, mask=left > 0, other=0).to(tl.uint64)
        beyond = (4 - tl.minimum(tl.maximum(left, 0), 4)) * 8
        word = word & (0xFFFFFFFF >> beyond.to(tl.uint64))
        first = first * FIRST + word
        second = second * SECOND + word
    place = (number * LANES + lanes + 1).to(tl.uint64) * PLACE
    tl.store(sums + which * 2, tl.sum(_scramble(first + place), 0).to(tl.int64, bitcast=True))
    mixed = _scramble(second ^ place)
    tl.store(sums + which * 2 + 1, tl.sum(mixed, 0).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _store_counts(
    out: tl.tensor,
    num_finite: tl.tensor,
    num_nan: tl.tensor,
    num_zero: tl.tensor,
    num_subnormal: tl.tensor,
) -> None:
    tl.store(out + 1, tl.sum(num_finite, 0).to(tl.float64))
    tl.store(out + 5, tl.sum(num_nan, 0).to(tl.float64))
    tl.store(out + 6, tl.sum(num_zero, 0).to(tl.float64))
    tl.store(out + 7, tl.sum(num_subnormal, 0).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _sum_up(  # noqa: PLR0913
    rows: tl.tensor,
    out: tl.tensor,
    VALUE: tl.constexpr,
    BITS: tl.constexpr,
    SIGNLESS: tl.constexpr,  # all bits but the sign; 0 for integers
    MANTISSA: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = rows + tl.program_id(0) * 4
    values = tl.load(row).to(tl.pointer_type(BITS))
    number = tl.load(row + 1)
    out += tl.load(row + 2) * 8
    num_taken = tl.minimum(number, SAMPLE)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    least, greatest = total + float("inf"), total - float("inf")
    num_finite = tl.zeros([BLOCK], dtype=tl.int32)
    num_nan, num_zero, num_subnormal = num_finite, num_finite, num_finite
    for start in range(0, num_taken, BLOCK):
        taken = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = taken < num_taken
        where = taken * (number - 1) // tl.maximum(num_taken - 1, 1)
        bits = tl.load(values + where, mask=inside, other=0)
        value = bits.to(VALUE, bitcast=True).to(tl.float64)
        finite = inside
        if SIGNLESS:
            size = bits.to(tl.int64) & SIGNLESS
            finite = inside & (size < (SIGNLESS >> MANTISSA << MANTISSA))
            num_nan += inside & (size > (SIGNLESS >> MANTISSA << MANTISSA))
            num_zero += inside & (size == 0)
            num_subnormal += inside & (size > 0) & (size < (1 << MANTISSA))
        else:
            num_zero += inside & (bits == 0)
        num_finite += finite
        least = tl.minimum(least, tl.where(finite, value, float("inf")))
        greatest = tl.maximum(greatest, tl.where(finite, value, float("-inf")))
        total += tl.where(finite, value, 0.0)
    tl.store(out, num_taken.to(tl.float64))
    tl.store(out + 2, tl.min(least, 0))
    tl.store(out + 3, tl.max(greatest, 0))
    tl.store(out + 4, tl.sum(total, 0))
    _store_counts(out, num_finite, num_nan, num_zero, num_subnormal)


def hash_items(items: torch.Tensor, sums: torch.Tensor, alignment: int) -> None:
    """Hash each row (address, bytes, number of the item) of a table into a row of sums."""
    _hash_items[(items.shape[0],)](items, sums, ALIGNMENT=alignment, num_warps=8, **CONSTANTS)


def sum_up(rows: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Summarise each row (address, number of values, place in ``out``) of a table."""
    dtype = _PARTS.get(dtype, dtype)
    value, bits, mantissa = _KINDS[dtype]
    signless = (1 << 8 * dtype.itemsize - 1) - 1 if dtype.is_floating_point else 0
    kind = {"VALUE": value, "BITS": bits, "SIGNLESS": signless, "MANTISSA": mantissa}
    _sum_up[(rows.shape[0],)](rows, out, SAMPLE=SAMPLE, BLOCK=_STATISTICS_BLOCK, **kind)
