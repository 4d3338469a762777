"""Weighted sums over a tensor, or over a part of it, that all ranks take in the same way."""

from collections.abc import Sequence
from typing import Any, Final

import torch

NUM_SUMS: Final = 4
"""So many numbers tell one parameter's gradient as this or that combination, and contradict it."""

_MOST_TAKEN: Final = 1 << 14
_BITS: Final = 31


def weighted_sums(tensor: torch.Tensor, num_elements: int, first: int = 0) -> torch.Tensor:
    """Return the sums, and after them that of the squares, over evenly spaced elements.

    The tensor holds those from number `first` on of one that has so many. Each element has weights
    of its own: plain sums are often zero by construction, as those of logits.
    """
    if not tensor.numel():
        return torch.zeros(NUM_SUMS + 1, dtype=torch.float64, device=tensor.device)
    # Odd, so that it meets all columns of a matrix, whose sides mostly are powers of two.
    stride = -(-num_elements // _MOST_TAKEN) | 1
    skipped = -first % stride
    taken = tensor.reshape(-1)[skipped::stride].to(torch.float64)
    place = (first + skipped) // stride
    weights = _table(tensor.device)[:, place : place + taken.numel()]
    return torch.cat([(weights * taken).sum(1), taken.square().sum().unsqueeze(0)])


_tables: dict[torch.device, torch.Tensor] = {}


def _table(device: torch.device) -> torch.Tensor:
    """Return the weights by the number of an element, from -1 to 1; whole numbers make them."""
    if device not in _tables:
        places = torch.arange(_MOST_TAKEN + 1, dtype=torch.int64, device=device)
        rows = []
        for row in range(NUM_SUMS):
            mixed = places * NUM_SUMS + row + 1
            for factor in (0x45D9F3B, 0x119DE1F3, 0x2C1B3C6D):  # odd, so that nothing is lost
                mixed = (mixed * factor) & ((1 << _BITS) - 1)
                mixed = mixed ^ (mixed >> 15)
            rows.append(mixed.to(torch.float64) / (1 << (_BITS - 1)) - 1.0)
        _tables[device] = torch.stack(rows)
    return _tables[device]


class PendingValues:
    """Numbers that a device may still be computing; nobody waits for them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to read vectors of doubles."""
        self._sizes = [tensor.numel() for tensor in tensors]
        self._parts: list[tuple[list[int], torch.Tensor, Any]] = []
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for device, indices in by_device.items():
            joined = torch.cat([tensors[index].reshape(-1) for index in indices])
            event = None
            if device.type == "cuda":
                host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
                joined = host.copy_(joined, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
            self._parts.append((indices, joined, event))

    def take(self) -> list[tuple[float, ...]] | None:
        """Return the vectors, None if they are not there yet."""
        if not all(event is None or event.query() for _, _, event in self._parts):
            return None
        found: list[tuple[float, ...]] = [()] * len(self._sizes)
        for indices, joined, _ in self._parts:
            values = iter(joined.tolist())
            for index in indices:
                found[index] = tuple(next(values) for _ in range(self._sizes[index]))
        return found
