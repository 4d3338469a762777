"""What kind of tensor something is, without importing what the program has not."""

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

_DTENSOR: Final = "torch.distributed.tensor"
_FUNCTIONAL: Final = "torch.distributed._functional_collectives"


def is_dtensor(tensor: object) -> bool:
    """Say whether this is a DTensor, without importing them."""
    kind = getattr(sys.modules.get(_DTENSOR), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_awaited(tensor: object) -> bool:
    """Say whether this stands for the result of a functional collective that may still run."""
    kind = getattr(sys.modules.get(_FUNCTIONAL), "AsyncCollectiveTensor", None)
    return kind is not None and type(tensor) is kind


def sharing_of(tensors: Sequence[Any], dim: int) -> tuple[int, ...]:
    """Return the ranks over which DTensors are split along one dimension, none if they differ."""
    first = tensors[0]
    kinds = {(each.device_mesh, each.placements) for each in tensors}
    axes = [
        axis
        for axis, placement in enumerate(first.placements)
        if placement.is_shard() and placement.dim == dim % first.ndim
    ]
    if len(kinds) != 1 or len(axes) != 1:
        return ()
    return tuple(dist.get_process_group_ranks(first.device_mesh.get_group(axes[0])))
