"""Tensors whose elements are numbered, so that whatever happens to them can be read off exactly."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from distdiag.events.sequences import FOREIGN, MIXED, PAD, TokenSpec

# What a digit may be, so that sums over some ranks are exact integers too: bfloat16 holds all
# integers up to 256 only.
_BASES: Final = {
    torch.float64: 1 << 40,
    torch.float32: 1 << 18,
    torch.float16: 1 << 7,
    torch.bfloat16: 1 << 4,
}
_UNKNOWN: Final = -1
_INTEGER_OFFSET: Final = 1 << 20
"""Added to integers, so that ids and labels of padding are none of our digits."""


class TokenCodes:
    """The numbers of all elements of one tensor, written in as many digits as its dtype needs.

    Digits begin at 1, and so do numbers: 0 or 1 in all digits is padding, and what is less too.
    The elements of a token (its channels) are numbered one after the other.
    """

    def __init__(self, spec: TokenSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        size = 1
        for each in spec.shape:
            size *= each
        self.num_channels = size // spec.num_tokens
        self._base = _BASES.get(dtype, 1 << 28)
        self._offset = 0 if dtype.is_floating_point else _INTEGER_OFFSET
        self.num_digits = 1
        while self._base**self.num_digits <= size:
            self.num_digits += 1
        rows_first = (spec.batch, spec.length, *_others(spec.shape, spec.dim))
        numbers = torch.arange(1, size + 1, device="cpu").reshape(rows_first)
        self._numbers = numbers.movedim(1, spec.dim)

    def digit(self, index: int) -> Tensor:
        """Return the tensor of one digit of all numbers, the lowest first."""
        digit: Tensor = self._numbers // self._base**index % self._base + 1 + self._offset
        return digit.to(self._device, self._dtype).contiguous()

    def tokens(self, digits: Sequence[Tensor]) -> tuple[int, ...]:
        """Return which token is at each place of a tensor that was made of ours, row by row."""
        if digits[0].ndim != len(self._spec.shape):
            return ()
        numbers = self._read(digits).unsqueeze(-1).movedim(self._spec.dim, 1).flatten(2)
        tokens = (numbers[..., 0] - 1) // self.num_channels
        result = torch.full_like(tokens, MIXED)
        if numbers.shape[-1] == self.num_channels:
            channels = torch.arange(1, self.num_channels + 1, device="cpu")
            wanted = tokens.unsqueeze(-1) * self.num_channels + channels
            result = torch.where((numbers == wanted).all(-1), tokens, result)
        result = result.masked_fill((numbers == _UNKNOWN).any(-1), FOREIGN)
        result = result.masked_fill((numbers == 0).all(-1), PAD)
        return tuple(result.flatten().tolist())

    def _read(self, digits: Sequence[Tensor]) -> Tensor:
        """Return the number of each element: 0 for padding, `_UNKNOWN` for no number of ours."""
        values = torch.stack([each.detach().cpu().to(torch.float64) for each in digits])
        values = values - self._offset
        weights = [float(self._base**index) for index in range(len(digits))]
        weighed = values.new_tensor(weights).reshape(-1, *[1] * digits[0].ndim)
        numbers = ((values - 1) * weighed).sum(0)
        is_ours = (values >= 1) & (values <= self._base) & (values == values.floor())
        is_known = is_ours.all(0) & (numbers <= self._numbers.numel())
        is_padding = (values <= 0).all(0) | (values == 1).all(0)
        known = numbers.masked_fill(~is_known, _UNKNOWN).masked_fill(is_padding, 0)
        return known.to(torch.int64)


def _others(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return the dimensions but for the batch and the sequence."""
    return tuple(size for index, size in enumerate(shape) if index != dim)[1:]


def by_token(spec: TokenSpec, values: Tensor) -> tuple[float, ...]:
    """Return the value of each token in a tensor of the full form; NaN where channels disagree."""
    values = values.detach().cpu().to(torch.float64).unsqueeze(-1)
    lanes = values.movedim(spec.dim, 1).flatten(2)
    least, greatest = lanes.amin(-1).flatten(), lanes.amax(-1).flatten()
    coarse = spec.dtype in ("bfloat16", "float16")
    room = (2e-2 if coarse else 1e-3) * torch.maximum(least.abs(), greatest.abs())
    middle = ((least + greatest) / 2).masked_fill(greatest - least > room, float("nan"))
    return tuple(round(value, 6) for value in middle.tolist())
