"""Where the gradient of each parameter arrives, and which tensor the optimizer holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distdiag.probes.keepers import param_groups
from distdiag.probes.meshes import mesh_of
from distdiag.probes.module_names import clean_name
from distdiag.probes.module_parts import own_parameters
from distdiag.probes.tensor_plans import local_part

MOST_READ: Final = 24
"""The gradients of so many parameters of a model are read, and of so many experts."""


class _Rows(NamedTuple):
    """How FSDP2 shards where it does not say so."""

    dim: int = 0


_ROWS: Final = _Rows()


class Leaf(NamedTuple):
    """A parameter as autograd sees it, and as the optimizer does; FSDP2 makes them differ.

    It shards `leaf` over `members`; `held` begins at row `first`, and `num_copies` ranks hold it.
    """

    name: str
    leaf: torch.Tensor
    held: torch.Tensor
    members: tuple[int, ...] = ()
    num_copies: int = 0
    first: int = 0
    is_table: bool = False


def leaves_of(root: nn.Module) -> list[Leaf]:
    """Return the parameters of a model that are trained, in the order of their names."""
    sharded = dict(_sharded(root))
    found: dict[int, Leaf] = {}
    for prefix, module in root.named_modules():
        for name, parameter in own_parameters(module).items():
            known = sharded.get((id(module), name))
            leaf = known or (None if parameter is None else Leaf("", parameter, parameter))
            if leaf is not None and _is_trained(leaf.leaf):
                full = clean_name(f"{prefix}.{name}".lstrip("."))
                is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
                leaf = leaf._replace(name=full, is_table=is_table)
                found.setdefault(id(leaf.held), leaf)
    return sorted(found.values(), key=lambda leaf: leaf.name)


def _is_trained(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and leaf.is_leaf and not is_lazy(leaf)


def _sharded(root: nn.Module) -> Iterator[tuple[tuple[int, str], Leaf]]:
    for module in root.modules():
        groups = param_groups(module) if hasattr(module, "_get_fsdp_state") else ()
        for group in groups:
            for record in group.fsdp_params:
                info = record._module_info
                yield (id(info.module), info.param_name), _leaf(record, group.mesh_info)


def _leaf(record: Any, mesh: Any) -> Leaf:  # noqa: ANN401
    # Without one there was no forward pass yet: then there is no gradient, either.
    leaf = getattr(record, "_unsharded_param", record.sharded_param)
    members = mesh_of(mesh.mesh).ranks
    size = getattr(mesh, "shard_mesh_size", 0)
    if not size or getattr(record, "fsdp_placement", _ROWS).dim != 0:
        return Leaf("", leaf, record.sharded_param, members)  # not to be added up
    local = local_part(leaf)
    rows = -(-local.shape[0] // size) if local.dim() else 0
    first = rows * int(mesh.shard_mesh_rank)
    return Leaf("", leaf, record.sharded_param, members, len(members) // size, first)


def chosen(leaves: list[Leaf], experts: set[int]) -> list[Leaf]:
    """Return the parameters to read: evenly spaced ones, the same on all ranks that hold them.

    `experts` are the ids of leaves that all-to-alls bring tokens of other ranks to.
    """
    dense = [leaf for leaf in leaves if id(leaf.leaf) not in experts]
    sparse = [leaf for leaf in leaves if id(leaf.leaf) in experts]
    return [*_spaced(dense), *_spaced(sparse)]


def _spaced(leaves: list[Leaf]) -> list[Leaf]:
    step = max(1, -(-len(leaves) // MOST_READ))
    return leaves[::step]
