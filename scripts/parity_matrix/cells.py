"""The kinds of parallelism of the matrix: how each of them wraps a model and deals out data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scripts.parity_matrix.models import Kit

_NO_NAMES: Final[frozenset[str]] = frozenset()


class Wish(NamedTuple):
    """What a mutation wants of the wrapper: to leave out parameters, or another group."""

    ignored: frozenset[str] = _NO_NAMES
    is_paired: bool = False


class Cell(NamedTuple):
    """One kind of parallelism, on `num_ranks` ranks with `num_data` data coordinates."""

    name: str
    num_ranks: int
    num_data: int
    wrap: Callable[[nn.Module, Kit, Wish], Any]
    accumulation: int = 1
    shards: bool = False
    is_tensor_parallel: bool = False
    has_engine: bool = False

    def data_rank(self, rank: int) -> int:
        """Return the data coordinate of a rank."""
        return rank * self.num_data // self.num_ranks

    def why_not(self, kit: Kit) -> str:
        """Say why the cell does not apply to a model; empty if it does."""
        return kit.no_tp if self.is_tensor_parallel else ""


def _mesh(*axes: tuple[str, int]) -> Any:  # noqa: ANN401
    return _cached_mesh(axes)


@functools.cache
def _cached_mesh(axes: tuple[tuple[str, int], ...]) -> Any:  # noqa: ANN401
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


@functools.cache
def _pair() -> Any:  # noqa: ANN401
    """Return the group of this rank and its neighbour."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    return groups[dist.get_rank() // 2]


def _ddp(model: nn.Module, _: Kit, wish: Wish) -> nn.Module:
    if wish.ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, wish.ignored)
    return DistributedDataParallel(model, process_group=_pair() if wish.is_paired else None)


def _sharded(model: nn.Module, kit: Kit, mesh: Any, ignored: Collection[str]) -> nn.Module:  # noqa: ANN401
    from torch.distributed.fsdp import fully_shard

    left_out = {model.get_parameter(name) for name in ignored}
    for name in kit.blocks:
        fully_shard(model.get_submodule(name), mesh=mesh, ignored_params=left_out)
    return fully_shard(model, mesh=mesh, ignored_params=left_out)


def _fsdp2(model: nn.Module, kit: Kit, wish: Wish) -> nn.Module:
    return _sharded(model, kit, _mesh(("dp_shard", 2)), wish.ignored)


def _hsdp(model: nn.Module, kit: Kit, wish: Wish) -> nn.Module:
    return _sharded(model, kit, _mesh(("dp_replicate", 2), ("dp_shard", 2)), wish.ignored)


def _split(model: nn.Module, kit: Kit, mesh: Any) -> nn.Module:  # noqa: ANN401
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {}
    for name, _ in model.named_modules():
        last = name.rpartition(".")[2]
        if last in kit.colwise:
            plan[name] = ColwiseParallel()
        elif last in kit.rowwise:
            plan[name] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def _tp(model: nn.Module, kit: Kit, _: Wish) -> nn.Module:
    return _split(model, kit, _mesh(("tp", 2)))


def _fsdp2_tp(model: nn.Module, kit: Kit, wish: Wish) -> nn.Module:
    mesh = _mesh(("dp_shard", 2), ("tp", 2))
    return _sharded(_split(model, kit, mesh["tp"]), kit, mesh["dp_shard"], wish.ignored)


def _alone(model: nn.Module, _: Kit, __: Wish) -> nn.Module:
    return model  # its engine wraps it


HAS_DEEPSPEED: Final = find_spec("deepspeed") is not None

WITHOUT: Final[Mapping[str, str]] = {} if HAS_DEEPSPEED else {"ZeRO-2": "it needs DeepSpeed"}
"""What is no cell, with why."""

CELLS: Final[Mapping[str, Cell]] = {
    cell.name: cell
    for cell in (
        Cell("ddp", 2, 2, _ddp),
        Cell("ddp+accumulation", 2, 2, _ddp, accumulation=2),
        Cell("fsdp2", 2, 2, _fsdp2, shards=True),
        Cell("tp", 2, 1, _tp, shards=True, is_tensor_parallel=True),
        Cell("hsdp", 4, 4, _hsdp, shards=True),
        Cell("fsdp2xtp", 4, 2, _fsdp2_tp, shards=True, is_tensor_parallel=True),
        Cell("ddp4", 4, 4, _ddp),
        *([Cell("zero2", 2, 2, _alone, has_engine=True)] if HAS_DEEPSPEED else []),
    )
}
