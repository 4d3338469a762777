"""Notices shards of one parameter that a program reduces or broadcasts as if they were copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distdiag.events.models import ShardsCombined
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import caller, site_here
from distdiag.probes.guard import guarded
from distdiag.probes.models.modules import clean_name
from distdiag.probes.models.own_steps import is_due
from distdiag.probes.models.snapshot import other_parts
from distdiag.probes.models.tensor_plans import address_of
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.untyped import Untyped
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal


class _Shard(NamedTuple):
    name: str
    owner: weakref.ref[nn.Parameter]
    is_gradient: bool
    members: tuple[int, ...]

    def is_at(self, tensor: torch.Tensor) -> bool:
        """Say whether it still lies there: memory that was given back may be anything by now."""
        owner = self.owner()
        whole: Untyped = owner.grad if self.is_gradient and owner is not None else owner
        if not is_dtensor(whole):
            return False
        local: torch.Tensor = whole._local_tensor
        return address_of(local) == address_of(tensor) and local.numel() == tensor.numel()


class CombinedShards(Probe):
    """Looks, at some steps, whether a collective is given the memory of a shard; tells it once."""

    name: ClassVar[str] = "combined-shards"

    def __init__(
        self,
        recorder: Recorder,
        shared: Signal[Any, Any, str],
        roots: Callable[[], Iterable[nn.Module]],
    ) -> None:
        """Know of no shard; `roots` are the models that there are."""
        super().__init__(recorder)
        self._shared = shared
        self._roots = roots
        self._shards: dict[int, _Shard] = {}
        self._made_at = (-1, -1)
        self._is_told = False

    def _install(self) -> None:
        self._subscribe(self._shared, self._before_share)

    def _before_share(self, tensors: object, group: object, op: str) -> None:
        if not self._is_told and is_due(self.recorder.step) and not torch.compiler.is_compiling():
            self._look(tensors, group, op)

    @guarded
    def _look(self, tensors: Untyped, group: Untyped, op: str) -> None:
        now = (self.recorder.step, self.recorder.num_backwards)
        if now != self._made_at:
            self._made_at = now
            self._shards = dict(self._find())
        if not self._shards:
            return
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            found = self._shards.get(address_of(tensor) or -1)
            if found is not None and found.is_at(tensor):
                ranks = set(dist.get_process_group_ranks(group))
                if len(ranks) > 1 and ranks <= set(found.members):
                    self._tell(found, sorted(ranks), op)
                    return

    def _find(self) -> Iterator[tuple[int, _Shard]]:
        """Yield the parts that this rank has of parameters and gradients, by where they lie."""
        for root in self._roots():
            for name, parameter in root.named_parameters():
                for tensor in (parameter, parameter.grad):
                    if tensor is None or not is_dtensor(tensor):
                        continue
                    whole: Untyped = tensor
                    address, size = address_of(whole._local_tensor), whole._local_tensor.numel()
                    if address and size < whole.numel():
                        is_gradient = tensor is not parameter
                        owner, members = weakref.ref(parameter), other_parts(whole)
                        yield address, _Shard(clean_name(name), owner, is_gradient, members)

    def _tell(self, found: _Shard, ranks: list[int], op: str) -> None:
        self._is_told = True
        self.recorder.event(
            ShardsCombined,
            parameter=found.name,
            is_gradient=found.is_gradient,
            ranks=tuple(ranks),
            reduce_op=op,
            step=self.recorder.step,
            site=site_here(self.recorder, caller()),
        )
