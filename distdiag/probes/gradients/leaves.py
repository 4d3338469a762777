"""Where the gradient of each parameter arrives, and where an optimizer finds it.

Wrappers that shard make them differ: a backward pass gives the gradient of the whole parameter, and
the optimizer holds some of its elements in tensors of its own.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.modules import clean_name, own_parameters
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.models.wrappers import param_groups
from distdiag.probes.untyped import Untyped

MOST_READ: Final = 256
"""The gradients of so many parameters of a model are read, and of so many experts."""


class Part(NamedTuple):
    """Elements of a parameter, from number `first` on, that an optimizer holds.

    They are `number` elements of `held` from `start` on; -1: all that it has.
    """

    held: torch.Tensor
    first: int = 0
    start: int = 0
    number: int = -1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of what is held, or of its gradient."""
        local = local_part(tensor).detach()
        return local if self.number < 0 else local.reshape(-1).narrow(0, self.start, self.number)


class Leaf(NamedTuple):
    """A parameter as autograd sees it, with the parts of it that this rank's optimizer holds.

    It is sharded over `members`, and `num_copies` ranks hold the same part; without members this
    rank holds all of it. In a leaf that many parameters share it begins at `offset`.
    """

    name: str
    leaf: torch.Tensor
    num_elements: int
    parts: tuple[Part, ...]
    members: tuple[int, ...] = ()
    num_copies: int = 0
    is_table: bool = False
    offset: int = -1

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this parameter, of that of the leaf."""
        local = local_part(gradient).detach()
        if self.offset < 0:
            return local
        return local.reshape(-1).narrow(0, self.offset, self.num_elements)


class Kept(NamedTuple):
    """What a library keeps of a model's gradients: by the ids of the parameters, `leaves`.

    `loss_scale` is by what it divides them before the step; `unread` names it if it is not known
    where it keeps them.
    """

    leaves: Mapping[int, Leaf] = {}
    loss_scale: float = 1.0
    unread: str = ""


KeptBy = Callable[[nn.Module], Kept | None]
"""Returns what a library keeps of a model, None if it has no hand in it."""


def leaves_of(root: nn.Module, kept: Kept) -> list[Leaf]:
    """Return the parameters of a model that are trained, in the order of their names."""
    sharded: dict[tuple[int, str], list[Leaf]] = {}
    for place, leaf in _sharded(root):
        sharded.setdefault(place, []).append(leaf)
    found: dict[tuple[int, int], Leaf] = {}
    for prefix, module in root.named_modules():
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for name, parameter in own_parameters(module).items():
            known = sharded.get((id(module), name), [])
            if not known and parameter is not None:
                plain = Leaf("", parameter, local_part(parameter).numel(), (Part(parameter),))
                known = [kept.leaves.get(id(parameter), plain)]
            for leaf in known:
                full = clean_name(f"{prefix}.{leaf.name or name}".lstrip("."))
                named = leaf._replace(name=full, is_table=is_table)
                if _is_trained(leaf.leaf):
                    found.setdefault((id(leaf.leaf), leaf.offset), named)
    return sorted(found.values(), key=lambda leaf: leaf.name)


def _is_trained(leaf: torch.Tensor) -> bool:
    return leaf.requires_grad and leaf.is_leaf and not is_lazy(leaf)


def _sharded(root: nn.Module) -> Iterator[tuple[tuple[int, str], Leaf]]:
    """Yield what FSDP keeps, by module and the name in it."""
    for module in root.modules():
        for group in param_groups(module) if hasattr(module, "_get_fsdp_state") else ():
            for record in group.fsdp_params:
                info = record._module_info
                yield (id(info.module), info.param_name), _of_record(record, group.mesh_info)
        handle = getattr(module, "_handle", None)
        if hasattr(handle, "flat_param"):
            yield from _of_flat(handle)


# FSDP2


class _Rows(NamedTuple):
    """How it shards where it does not say so."""

    dim: int = 0


_BY_ROWS: Final = _Rows()


def _of_record(record: Untyped, mesh: Untyped) -> Leaf:
    # Without one there was no forward pass yet: then there is no gradient, either.
    leaf = getattr(record, "_unsharded_param", record.sharded_param)
    local = local_part(leaf)
    members = mesh_of(mesh.mesh).ranks
    size = getattr(mesh, "shard_mesh_size", 0)
    if not size or getattr(record, "fsdp_placement", _BY_ROWS).dim != 0:
        return Leaf("", leaf, local.numel(), (), members)  # not to be added up
    rows = -(-local.shape[0] // size) if local.dim() else 0
    first = rows * int(mesh.shard_mesh_rank) * math.prod(local.shape[1:])
    parts = (Part(record.sharded_param, first),)
    return Leaf("", leaf, local.numel(), parts, members, len(members) // size)


# FSDP1: one flat parameter for many


def _of_flat(handle: Untyped) -> Iterator[tuple[tuple[int, str], Leaf]]:
    flat = handle.flat_param
    if not handle.uses_sharded_strategy:
        return  # the optimizer holds what autograd sees, or views of it
    members = tuple(dist.get_process_group_ranks(handle.process_group))
    size = flat._sharded_size.numel()
    begin = size * members.index(dist.get_rank())
    sections = zip(flat._numels_with_padding, flat._is_padding_mask, strict=True)
    ends = accumulate(flat._numels_with_padding)
    own = [
        (end - number, number)
        for end, (number, is_padding) in zip(ends, sections, strict=True)
        if not is_padding
    ]
    named = zip(flat._fqns, flat._param_infos, own, strict=True)
    for index, (full, info, (offset, number)) in enumerate(named):
        first = min(max(begin - offset, 0), number)
        part = Part(flat, first, max(offset - begin, 0))
        part = part._replace(number=max(0, min(offset + number, begin + size) - offset - first))
        if handle._use_orig_params:
            part = part._replace(held=flat._params[index], start=0)
        parts = (part,) if part.number else ()
        leaf = Leaf("", flat, number, parts, members, 1, offset=offset)
        yield (id(info.module), info.param_name), leaf
        yield (id(handle._fully_sharded_module), "_flat_param"), leaf._replace(name=full)


# Which of them are read


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
