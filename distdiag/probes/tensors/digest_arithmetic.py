"""How a tensor on a CUDA device becomes a digest, with operators of torch and in plain integers.

A tensor is a stream of little-endian 32-bit words, padded with zero bytes, in items of ``ITEM``
bytes. Each of ``LANES`` lanes takes every LANES-th word of an item and evaluates two polynomials
modulo 2**64 with its words as coefficients; the values are scrambled together with the place of
the lane, and their sum is what the item contributes. ``digest_kernels`` does the same at speed.
"""

from typing import Final

import torch

ITEM: Final = 1 << 20
LANES: Final = 2048
# Odd numbers that are 5 modulo 8, so that their powers repeat as late as can be.
FIRST: Final = 0x9E3779BD
SECOND: Final = 0xC2B2AE4D
PLACE: Final = 0x9E3779B97F4A7C15
_SCRAMBLE: Final = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
CONSTANTS: Final = {"LANES": LANES, "FIRST": FIRST, "SECOND": SECOND, "PLACE": PLACE}
# Zero bytes fill up the last row of words.
ROW: Final = 4 * LANES
_MODULO: Final = 1 << 64


def hexadecimal(first: int, second: int, num_bytes: int) -> str:
    """Return the digest of a tensor from the sums over its items and its size."""
    halves = (_scramble_int(first + num_bytes), _scramble_int(second + num_bytes * PLACE))
    return "g" + "".join(f"{half:016x}" for half in halves)


def _scramble_int(value: int) -> int:
    value %= _MODULO
    for factor in _SCRAMBLE:
        value = (value ^ value >> 33) * factor % _MODULO
    return value ^ value >> 33


def _signed(value: int) -> int:
    value %= _MODULO
    return value - _MODULO if value >= _MODULO // 2 else value


def _scramble(value: torch.Tensor) -> torch.Tensor:
    for factor in _SCRAMBLE:
        value = (value ^ _shifted(value)) * _signed(factor)
    return value ^ _shifted(value)


def _shifted(value: torch.Tensor) -> torch.Tensor:
    return (value >> 33) & ((1 << 31) - 1)  # without the copies of the sign


def powers(device: torch.device) -> torch.Tensor:
    """Return what the rows of a whole item are multiplied with, for either polynomial."""
    exponents = range(ITEM // ROW - 1, -1, -1)
    table = [[_signed(pow(base, each, _MODULO)) for each in exponents] for base in (FIRST, SECOND)]
    return upload(torch.tensor(table, dtype=torch.int64, device="cpu"), device)


def hash_item(
    words: torch.Tensor, number: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Hash the words of one item, as the kernel does, with operators of torch."""
    rows = (words.to(torch.int64) & 0xFFFFFFFF).view(-1, LANES)
    lanes = torch.arange(1, LANES + 1, device=words.device)
    place = (number * LANES + lanes) * _signed(PLACE)
    first, second = weights[:, -rows.shape[0] :].unsqueeze(2)
    out[0] = _scramble((rows * first).sum(0) + place).sum()
    out[1] = _scramble((rows * second).sum(0) ^ place).sum()


def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put a table into the memory of the device without a wait."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
