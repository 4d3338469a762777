"""The models that a program trains, under names that do not tell how they are wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from distdiag.probes.base import Patches
from distdiag.probes.models.modules import clean_name
from distdiag.probes.models.registry import LiveModels, class_of, roots_of
from distdiag.probes.models.tensor_plans import Held, Surroundings, plan_of
from distdiag.probes.models.wrappers import WrapTimes, unwrapped, walk


class TrainedModels:
    """Knows the models with trainable parameters, and how they are spread over the ranks."""

    def __init__(self, rank: int, fail: Callable[[Exception], None]) -> None:
        """Know of none yet; `fail` gets what goes wrong here."""
        self._rank = rank
        self._fail = fail
        self._modules = LiveModels()
        self._names: dict[int, tuple[nn.Module, str]] = {}
        self._num_named = -1
        self._world_size = 1
        self.mesh_sizes: dict[str, int] = {}
        """The sizes of the axes on which parameters were seen, by name."""

    def watch(self, patches: Patches) -> None:
        """Take note of each module that is made from now on."""
        self._modules.watch(patches, self._fail)

    def trained(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models with trainable parameters under names that do not tell wrappers."""
        numbers: dict[str, int] = {}
        for root in roots_of(self._modules.alive()):
            if any(parameter.requires_grad for parameter in root.parameters()):
                kind = class_of(root)
                number = numbers[kind] = numbers.get(kind, 0) + 1
                yield kind if number == 1 else f"{kind}#{number}", root

    @property
    def world_size(self) -> int:
        """How many ranks there are, or were before the script destroyed their group."""
        if dist.is_initialized():
            self._world_size = dist.get_world_size()
        return self._world_size

    def held(self) -> Iterator[tuple[str, Held]]:
        """Yield all tensors of these models under the names of both."""
        around = Surroundings({}, {}, {}, (), tuple(range(self.world_size)), WrapTimes())
        for model, root in self.trained():
            for each in plan_of(list(walk(root)), around):
                if each.plan.mesh is not None:
                    sizes = zip(each.plan.mesh.names, each.plan.mesh.sizes, strict=True)
                    self.mesh_sizes.update(sizes)
                yield f"{model}/{each.plan.name}", each

    def data_group(self) -> tuple[int, ...]:
        """Return the ranks that a wrapper feeds with different data; empty if none tells."""
        for _, root in self.trained():
            for _, _, wrapper in walk(root):
                if wrapper.ranks:
                    return wrapper.ranks
        return ()

    def devices(self) -> tuple[str, ...]:
        """Return the kinds of devices that the program uses."""
        found = {p.device.type for _, root in self.trained() for p in root.parameters()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found.add("cuda")
        return tuple(sorted(found))

    def coordinate(self) -> tuple[int, int]:
        """Return the data coordinate of this rank, and how many there are."""
        group = self.data_group()
        if self._rank in group:
            return group.index(self._rank), len(group)
        is_sharded = any(held.plan.mesh is not None for _, held in self.held())
        if is_sharded or self.world_size == 1:
            return 0, 1  # the parts of one model see the same samples
        return self._rank, self.world_size

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of a part of these models; None if it is no part of any."""
        if self._num_named != self._modules.count:
            self._num_named = self._modules.count
            self._names = {
                id(part): (part, f"{model}/{clean_name(name)}")
                for model, root in self.trained()
                for name, part in unwrapped(root).named_modules()
            }
        known = self._names.get(id(module))
        return known[1] if known is not None else None
