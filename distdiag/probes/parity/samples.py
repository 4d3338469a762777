"""The samples that batches are collated from, so that those of all ranks can be collated into one.

The data loader's own function makes the batch of a run on fewer ranks: nothing has to be joined,
and nothing is invented to fill up unequal lengths.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeGuard

import torch
from torch.utils.data._utils import pin_memory

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import attempt

Collate = Callable[[Any], Any]

_pin_memory: Final[Callable[[object], object]] = pin_memory.pin_memory
NO_BATCH: Final = object()
"""What stands for a batch that could not be collated."""


class Kept:
    """A batch with the samples that it was collated from, on its way from a worker."""

    def __init__(self, batch: object, samples: bytes) -> None:
        """Hold both; `samples` are empty if they cannot be kept."""
        self.batch = batch
        self.samples = samples

    def pin_memory(self) -> Kept:
        """Pin the batch, as the data loader would have done without the samples."""
        return Kept(_pin_memory(self.batch), self.samples)


class Keeping:
    """A collate function that keeps the samples; it travels to workers, so it is a class."""

    def __init__(self, collate: Collate) -> None:
        """Collate with this function of the program."""
        self.collate = collate

    def __call__(self, samples: object) -> Kept:
        """Collate, and keep what the samples were before: the function may change them."""
        kept = attempt(_ignore, packed, samples) or b""
        return Kept(self.collate(samples), kept)


def _ignore(_: Exception) -> None:
    """Go on without samples that cannot be kept: the batches themselves are then joined."""


def packed(samples: object) -> bytes:
    """Return the samples as bytes; views of large tensors bring only what they show."""
    if not isinstance(samples, list | tuple):
        return b""
    stream = io.BytesIO()
    with out_of_sight():
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(list(samples))
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Untyped:
        if not _is_plain(value):
            return NotImplemented
        local = value.detach().contiguous()
        data = local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
        return _tensor, (data, str(local.dtype).removeprefix("torch."), tuple(local.shape))


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_quantized


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def collated(
    parts: Sequence[bytes], collate: Collate, is_own: Callable[[int, object], bool]
) -> object:
    """Collate the samples of several ranks into one batch, NO_BATCH if that does not work.

    `is_own` tells whether the batch of one of the ranks by itself is what it was there: it is not
    if the function draws random numbers or keeps something from batch to batch.
    """
    with _own_draws():
        for number, part in enumerate(parts):
            batch = _collated([part], collate)
            if batch is NO_BATCH or not is_own(number, batch):
                return NO_BATCH
        return _collated(parts, collate) if len(parts) > 1 else batch


def _collated(parts: Sequence[bytes], collate: Collate) -> object:
    def made() -> tuple[object]:
        return (collate([sample for part in parts for sample in pickle.loads(part)]),)

    found = attempt(_ignore, made)
    return NO_BATCH if found is None else found[0]


@contextmanager
def _own_draws() -> Iterator[None]:
    """Leave the generators of the program as they were."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
