"""Parts of sharded parameters among what a program saves as plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from distdiag.probes.keepers import sharded_parameters, walk
from distdiag.probes.module_names import clean_name
from distdiag.probes.module_parts import own_parameters
from distdiag.probes.tensor_kinds import is_dtensor
from distdiag.probes.tensor_plans import address_of

_DEEPEST: Final = 6
_MOST_TENSORS: Final = 20_000


def slices_in(saved: object, roots: Iterable[nn.Module]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the parameters whose local part is saved, and the ranks that hold the other parts."""
    shards = {address: found for root in roots for address, found in _shards(root)}
    if not shards:
        return (), ()
    found = {}
    for count, tensor in enumerate(_tensors(saved, _DEEPEST)):
        if count >= _MOST_TENSORS:
            break
        name, shape, members = shards.get(address_of(tensor) or 0, ("", (), ()))
        if name and tuple(tensor.shape) == shape:
            found[name] = members
    return tuple(found), next(iter(found.values()), ())


def _shards(root: nn.Module) -> Iterator[tuple[int, tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    tree = list(walk(root))
    records = sharded_parameters(tree)
    for path, module, _ in tree:
        for name, parameter in own_parameters(module).items():
            record = records.get((id(module), name))
            whole: Any = parameter if record is None else record.sharded_param
            if whole is None or not is_dtensor(whole):
                continue
            local = whole._local_tensor
            if 0 < local.numel() < whole.numel():
                members = _other_parts(whole)
                full = clean_name(f"{path}.{name}" if path else name)
                yield address_of(local) or -1, (full, tuple(local.shape), members)


def _other_parts(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the ranks that hold the parts of one copy, with this one."""
    mesh, here = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    axes = zip(here, tensor.placements, strict=False)
    where = [slice(None) if each.is_shard() else at for at, each in axes]
    return tuple(mesh[tuple(where)].flatten().tolist())


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if not is_dtensor(value):
            yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
