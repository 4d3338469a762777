"""A few figures of what each module returns for each sample, small enough to keep."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.kinds import is_dtensor

_weights: dict[tuple[int, torch.device], torch.Tensor] = {}


class Figures(NamedTuple):
    """What was computed of an output, and of how many elements of each sample.

    `axis` is that of the samples, -1 if they stand one behind the other.
    """

    values: torch.Tensor
    num_elements: int
    axis: int
    dtype: str


def figures_of(output: object, batch_size: int) -> Figures | None:
    """Return figures of shape (samples, 3).

    They are the mean, the root of the mean square, and a mean with fixed weights that sees
    permutations. None if the output has no floating-point tensor whose samples can be
    distinguished.
    """
    tensor = _first_tensor(output)
    if tensor is None or batch_size < 1:
        return None
    with out_of_sight():
        axis, rows = _rows(tensor.detach(), batch_size)
        if rows is None or not rows.shape[1]:
            return None
        values, dtype = rows.float(), str(rows.dtype).removeprefix("torch.")
        weights = _weights_of(values.shape[1], values.device)
        mean = values.mean(1)
        square = values.square().mean(1).sqrt()
        weighted = (values @ weights) / values.shape[1]
        figures = torch.stack((mean, square, weighted), 1).cpu()
        return Figures(figures, values.shape[1], axis, dtype)


def coarser(first: str, second: str) -> str:
    """Return which of two dtypes has the larger unit of rounding; an empty name is none."""
    if not first or not second:
        return first or second
    units = [torch.finfo(getattr(torch, name)).eps for name in (first, second)]
    return first if units[0] >= units[1] else second


def _first_tensor(output: object) -> torch.Tensor | None:
    """Return the first floating-point tensor, None if this rank cannot read it as a whole."""
    found = next(_floating(output), None)
    if found is not None and is_dtensor(found):
        whole = all(placement.is_replicate() for placement in found.placements)  # type: ignore[attr-defined]
        found = found._local_tensor if whole else None  # type: ignore[attr-defined]
    return found if found is not None and is_readable(found) else None


def _floating(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.ndim:
            yield output
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _floating(each)
    elif isinstance(output, dict):
        yield from _floating(list(output.values()))


def _rows(tensor: torch.Tensor, batch_size: int) -> tuple[int, torch.Tensor | None]:
    for axis, size in enumerate(tensor.shape):
        if size == batch_size:
            return axis, tensor.movedim(axis, 0).reshape(batch_size, -1)
    if tensor.shape[0] and tensor.shape[0] % batch_size == 0:
        return -1, tensor.reshape(batch_size, -1)
    return -1, None


def _weights_of(size: int, device: torch.device) -> torch.Tensor:
    key = (size, device)
    if key not in _weights:
        if len(_weights) > 64:
            _weights.clear()
        numbers = torch.arange(size, dtype=torch.float64, device="cpu")
        _weights[key] = torch.cos(numbers * 2.399963).float().to(device)
    return _weights[key]
