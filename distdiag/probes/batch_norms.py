"""What batch normalisation took for the mean and variance of a batch, read where it is saved.

The graph of a model's output holds the statistics by which its layers have normalised. No module is
hooked for that, and nothing is computed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from distdiag.data_event import NormStatistics
from distdiag.probes.loss_terms import kind_of, saved
from distdiag.probes.module_names import clean_name
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.sample_rows import tensors_in
from distdiag.probes.tensor_content import contents
from distdiag.probes.tensor_plans import address_of

MOST_NODES: Final = 5000
MOST_LAYERS: Final = 8
MOST_CHANNELS: Final = 4

_NORMS: Final = frozenset({"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"})


def local_norms(root: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of torch's plain batch normalisation that are neither frozen nor shared."""
    kind = nn.modules.batchnorm._BatchNorm
    return {
        clean_name(name): module
        for name, module in root.named_modules()
        if isinstance(module, kind) and type(module).forward is kind.forward and module.training
    }


class _Layer(NamedTuple):
    """One layer in the graph: for some channels the mean, and one over the deviation."""

    name: str
    num_samples: int
    num_values: int
    num_channels: int
    means: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor]
    epsilon: float


class NormReading:
    """The statistics of the layers of one forward pass, which a device may still be bringing."""

    def __init__(self, output: object, layers: dict[str, nn.Module]) -> None:
        """Begin to read those of these layers that lead to an output."""
        with out_of_sight():
            found = list(itertools.islice(_layers_of(output, layers), MOST_LAYERS))
            self._pending = contents([t for each in found for t in (*each.means, *each.scales)])
        # A device reads what it needs; the graph may go.
        self._layers = [each._replace(means=(), scales=()) for each in found]

    def take(self) -> tuple[NormStatistics, ...] | None:
        """Return the statistics, None if they are not there yet."""
        found = self._pending.take()
        if found is None:
            return None
        values = [math.nan if each is None else each.mean for each in found]
        told, place = [], 0
        for each in self._layers:
            width = each.num_channels
            means = values[place : place + width]
            scales = values[place + width : place + 2 * width]
            place += 2 * width
            variances = [1 / scale**2 - each.epsilon if scale else math.nan for scale in scales]
            if all(map(math.isfinite, (*means, *variances))):
                told.append(
                    NormStatistics(
                        each.name,
                        each.num_samples,
                        each.num_values,
                        tuple(means),
                        tuple(max(value, 0.0) for value in variances),
                    )
                )
        return tuple(told)


def _layers_of(output: object, layers: dict[str, nn.Module]) -> Iterator[_Layer]:
    kept = {name: module.running_mean for name, module in layers.items()}
    names = {address_of(t): name for name, t in kept.items() if isinstance(t, torch.Tensor)}
    for node in _nodes_below(output):
        if kind_of(node)[0] in _NORMS and node._saved_training:
            mean, scale = saved(node, "result1"), saved(node, "result2")
            running, given = saved(node, "running_mean"), saved(node, "input")
            if mean is None or scale is None or running is None or given is None:
                continue
            name = names.get(address_of(running))
            if name is not None and given.numel():
                num_values = given.numel() // mean.numel()
                shown = range(0, mean.numel(), -(-mean.numel() // MOST_CHANNELS))
                parts = [[each[channel] for channel in shown] for each in (mean, scale)]
                sizes = given.shape[0], num_values, len(shown)
                yield _Layer(name, *sizes, parts[0], parts[1], _epsilon(node))


def _epsilon(node: Any) -> float:  # noqa: ANN401
    found = getattr(node, "_saved_eps", None)
    return float(node._saved_epsilon if found is None else found)


def _nodes_below(output: object) -> Iterator[Any]:
    waiting = deque(t.grad_fn for t in tensors_in(output) if t.grad_fn is not None)
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.popleft()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]
