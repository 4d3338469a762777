"""Twelve ways to break a distributed run, each through the means by which it happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from scripts.parity_matrix.cells import Cell, Wish
from scripts.parity_matrix.models import Batch, Kit, Precision

CLEAN: Final = "clean"

_BEFORE_THE_ENGINE: Final = frozenset({CLEAN, "skip", "shift", "mask", "double", "dropout", "lr"})
"""What can be done where an engine keeps gradients and steps to itself."""


class Place(NamedTuple):
    """Where a mutation acts: the model, how it is run, in which precision, and on which rank."""

    kit: Kit
    cell: Cell
    precision: Precision
    rank: int

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last data coordinate."""
        return self.cell.data_rank(self.rank) == self.cell.num_data - 1


class Mutation:
    """Changes nothing: each way to break a run changes one of these moments."""

    rate: float = 1.0
    """What the learning rate is multiplied by."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._layer = place.kit.layer

    @staticmethod
    def applies(cell: Cell) -> bool:
        """Say whether there is such a thing in a cell."""
        return cell.name != "ddp4"

    def wish(self) -> Wish:
        """Return what is wanted of the wrapper."""
        return Wish()

    def built(self, model: nn.Module) -> None:
        """Change the model before it is wrapped."""

    def wrapped(self, model: nn.Module) -> None:
        """Change the model after it was wrapped."""

    def batch(self, batch: Batch) -> Batch:
        """Change what the model gets."""
        return batch

    def loss(self, items: torch.Tensor) -> torch.Tensor:
        """Make the loss out of those of the samples."""
        return items.mean()

    def after_backward(self, model: nn.Module) -> None:
        """Change gradients."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Change parameters."""

    def _weight(self, model: nn.Module) -> Any:  # noqa: ANN401
        return model.get_parameter(f"{self._layer}.weight")


class _OverData(Mutation):
    """Needs several data coordinates."""

    @staticmethod
    def applies(cell: Cell) -> bool:
        """Say so."""
        return cell.num_data > 1 and Mutation.applies(cell)


class Drop(_OverData):
    """One parameter is left out of the reduction of gradients."""

    def wish(self) -> Wish:
        """Leave it out."""
        return Wish(ignored=frozenset({f"{self._layer}.weight"}))


class Sum(_OverData):
    """Gradients are summed over the data coordinates, not averaged."""

    def after_backward(self, model: nn.Module) -> None:
        """Take the division back."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._place.cell.num_data)


class Scale(Mutation):
    """The gradient of one layer is slightly too large."""

    def after_backward(self, model: nn.Module) -> None:
        """Scale it."""
        self._weight(model).grad.mul_(1.02 if self._place.precision.is_coarse else 1.001)


class Skip(_OverData):
    """The last coordinate contributes nothing."""

    def loss(self, items: torch.Tensor) -> torch.Tensor:
        """Take the loss out."""
        return items.mean() * (0.0 if self._place.is_last else 1.0)


class Swap(Mutation):
    """Two ranks hold one another's shard of a weight from the second step on."""

    @staticmethod
    def applies(cell: Cell) -> bool:
        """Say so."""
        return cell.shards

    def after_step(self, model: nn.Module, step: int) -> None:
        """Exchange the shards of neighbours."""
        if step == 0:
            mine = self._weight(model)._local_tensor
            everything = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everything, mine.contiguous())
            with torch.no_grad():
                mine.copy_(everything[self._place.rank ^ 1])


class Shift(_OverData):
    """The labels of the last coordinate are shifted by one."""

    def batch(self, batch: Batch) -> Batch:
        """Shift them."""
        if self._place.is_last:
            batch["labels"] = batch["labels"].roll(1, -1)
        return batch


class Mask(_OverData):
    """The last coordinate hides a part of the input that it should not."""

    def batch(self, batch: Batch) -> Batch:
        """Hide it."""
        if not self._place.is_last:
            return batch
        name = "attention_mask" if "attention_mask" in batch else "x"
        hidden = batch[name].clone()
        if name == "x":
            hidden[:, ..., : hidden.shape[-1] // 2] = 0
        else:
            hidden[:, : hidden.shape[1] // 3] = 0
        return {**batch, name: hidden}


class Stale(Mutation):
    """One rank falls back to old weights of one layer."""

    @staticmethod
    def applies(cell: Cell) -> bool:
        """Say so."""
        return cell.num_data > 1 and not cell.shards and Mutation.applies(cell)

    def built(self, model: nn.Module) -> None:
        """Keep the weights."""
        self._old = self._weight(model).detach().clone()

    def after_step(self, model: nn.Module, step: int) -> None:
        """Take them again."""
        if step == 1 and self._place.is_last:
            with torch.no_grad():
                self._weight(model).copy_(self._old)


class Double(_OverData):
    """One sample or token of the last coordinate is counted twice."""

    def loss(self, items: torch.Tensor) -> torch.Tensor:
        """Add it once more."""
        extra = items[0] if self._place.is_last else 0.0
        return (items.sum() + extra) / len(items)


class Group(Mutation):
    """DDP reduces over pairs of ranks, not over all."""

    @staticmethod
    def applies(cell: Cell) -> bool:
        """Say so."""
        return cell.name == "ddp4"

    def wish(self) -> Wish:
        """Use the group of a pair."""
        return Wish(is_paired=True)


class Dropout(Mutation):
    """What one layer returns is dropped in part."""

    def wrapped(self, model: nn.Module) -> None:
        """Drop it: within the layer, or after what tensor parallelism makes of its output."""
        layer = model.get_submodule(self._layer)
        if self._place.cell.is_tensor_parallel:
            layer.register_forward_hook(lambda _, __, output: F.dropout(output, 0.1))
            return
        forward = layer.forward
        layer.forward = lambda *args: F.dropout(forward(*args), 0.1)


class Rate(Mutation):
    """The learning rate is off by one per cent."""

    rate = 1.01


MUTATIONS: Final[Mapping[str, type[Mutation]]] = {
    "clean": Mutation,
    "drop": Drop,
    "sum": Sum,
    "scale": Scale,
    "skip": Skip,
    "swap": Swap,
    "shift": Shift,
    "mask": Mask,
    "stale": Stale,
    "double": Double,
    "group": Group,
    "dropout": Dropout,
    "lr": Rate,
}


def applies(name: str, cell: Cell) -> bool:
    """Say whether a mutation is part of a cell; every cell runs unbroken too."""
    if cell.has_engine and name not in _BEFORE_THE_ENGINE:
        return False
    return name == CLEAN or MUTATIONS[name].applies(cell)
