"""What keeps the tensors of a model alike over ranks: DDP, FSDP, ZeRO, and their groups."""

import sys
from collections.abc import Iterator, Sequence, Set
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.events.models import Policy
from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.modules import clean_name, own_modules, own_parameters
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.untyped import Untyped

# How wrappers should compute with the parameters of a unit, and where they should keep them.

_GATHERED: Final = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
"""The strategies of FSDP1 that keep parameters whole between forward and backward."""


def policy_of_group(group: object) -> Policy:
    """Return the policy of what FSDP2 gathers together; of other versions, as much as they tell."""
    precision = getattr(group, "mp_policy", None)
    offload = getattr(group, "offload_policy", None)
    kind = type(offload).__name__
    return Policy(
        param_dtype=_dtype(precision, "param_dtype"),
        reduce_dtype=_dtype(precision, "reduce_dtype"),
        offload="cpu" if kind == "CPUOffloadPolicy" else "",
        reshard_after_forward=_resharding(group),
    )


def _resharding(group: object) -> str:
    mesh = getattr(group, "mesh_info", None)
    if mesh is None or not hasattr(group, "post_forward_mesh_info"):
        return ""
    after = group.post_forward_mesh_info
    if after is None or after is mesh or after == mesh:
        return str(after is not None)
    return str(getattr(after, "shard_mesh_size", True))


def policy_of_wrapper(module: object) -> Policy:
    """Return the policy of FSDP1 or DDP."""
    precision = getattr(module, "mixed_precision", None)
    offload = getattr(module, "cpu_offload", None)
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    resharding = "" if strategy in ("", "NO_SHARD") else str(strategy not in _GATHERED)
    return Policy(
        param_dtype=_dtype(precision, "param_dtype"),
        reduce_dtype=_dtype(precision, "reduce_dtype"),
        offload="cpu" if getattr(offload, "offload_params", False) else "",
        reshard_after_forward=resharding,
    )


def _dtype(precision: object, name: str) -> str:
    dtype = getattr(precision, name, None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


# The wrapper of each module.

_FSDP2: Final = "torch.distributed.fsdp._fully_shard._fully_shard"
_FSDP1: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"
_ZERO: Final = "deepspeed.runtime.engine"


class Wrapper(NamedTuple):
    """A wrapper around a module, and the global ranks that it keeps together.

    What it was told to leave to each rank is `ignored`, by names below its unit, or in one of the
    sets of `ignored_objects`: parameters and modules.
    """

    kind: str = ""
    unit: str = ""
    ranks: tuple[int, ...] = ()
    ignored: frozenset[str] = frozenset()
    ignored_objects: tuple[Set[object], ...] = ()
    is_sharding: bool = False
    policy: Policy = Policy()

    def ignores(self, name: str, *objects: object) -> bool:
        """Say whether a tensor, by its full name or by itself and its module, is left out."""
        is_named = bool(self.ignored) and name.removeprefix(f"{self.unit}.") in self.ignored
        return is_named or any(each in those for those in self.ignored_objects for each in objects)


UNWRAPPED: Final = Wrapper()

Tree = Sequence[tuple[str, nn.Module, Wrapper]]
"""All modules of a model, as `walk` yields them: one walk serves whoever looks at them together."""


def wrapper_of(module: Untyped, unit: str) -> Wrapper | None:
    """Return what this module does for the tensors below it, None if it is no wrapper."""
    unit = clean_name(unit)
    if isinstance(module, DistributedDataParallel):
        ignored = frozenset(map(clean_name, getattr(module, "parameters_to_ignore", ())))
        policy = policy_of_wrapper(module)
        return Wrapper("DDP", unit, _ranks(module.process_group), ignored, policy=policy)
    kind = _is_a(module, _FSDP2, "FSDPModule")
    if kind:
        return Wrapper("FSDP2", unit, _mesh_ranks(module), is_sharding=True)
    if _is_a(module, _FSDP1, "FullyShardedDataParallel"):
        shards = getattr(module.sharding_strategy, "name", "") != "NO_SHARD"
        return Wrapper(
            "FSDP1",
            unit,
            _ranks(module.process_group),
            ignored_objects=(module._ignored_params, module._ignored_modules),
            is_sharding=shards,
            policy=policy_of_wrapper(module),
        )
    if _is_a(module, _ZERO, "DeepSpeedEngine"):
        shards = module.zero_optimization_stage() >= 3
        return Wrapper("ZeRO", unit, _ranks(module.seq_data_parallel_group), is_sharding=shards)
    return None


def _is_a(module: nn.Module, where: str, name: str) -> bool:
    # Who has not imported it cannot have used it.
    kind = getattr(sys.modules.get(where), name, None)
    return kind is not None and isinstance(module, kind)


_members: WeakMap[Any, tuple[int, ...]] = WeakMap()
"""The ranks of the groups of wrappers: of a group that was destroyed nobody else knows them."""


def _ranks(group: object) -> tuple[int, ...]:
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_group_ranks:
        _members[group] = tuple(dist.get_process_group_ranks(group))
    return _members.get(group, ())


def param_groups(module: Untyped) -> list[Any]:
    """Return what FSDP2 keeps for one module: none, one or several groups of parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _mesh_ranks(module: Untyped) -> tuple[int, ...]:
    for part in module.modules():
        if hasattr(part, "_get_fsdp_state"):
            for group in param_groups(part):
                return mesh_of(group.mesh_info.mesh).ranks
    return ()


def _groups_in(tree: Tree) -> Iterator[Any]:
    for _, module, _ in tree:
        if hasattr(type(module), "_get_fsdp_state"):
            yield from param_groups(module)


def sharded_parameters(tree: Tree) -> dict[tuple[int, str], Any]:
    """Return what FSDP2 manages of a model, by module and name: its record of the parameter."""
    found: dict[tuple[int, str], Any] = {}
    for record in (each for group in _groups_in(tree) for each in group.fsdp_params):
        info = record._module_info
        owners = [(info.module, info.param_name)]
        owners += zip(info.shared_modules, info.shared_param_names, strict=True)
        for owner, name in owners:
            found[id(owner), name] = record
    return found


def policies_of(tree: Tree) -> dict[int, Policy]:
    """Return the policy of each record of FSDP2 in a model, by the id of the record."""
    return {
        id(each): policy
        for group in _groups_in(tree)
        for policy in [policy_of_group(group)]
        for each in group.fsdp_params
    }


def parameters_in(tree: Tree) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model; one that several modules have comes more than once."""
    for _, module, _ in tree:
        for parameter in own_parameters(module).values():
            if parameter is not None:
                yield parameter


class WrapTimes:
    """Which parameters were there when FSDP2 wrapped a module: later ones it does not know."""

    def __init__(self) -> None:
        self._known: WeakMap[nn.Module, frozenset[str]] = WeakMap()

    def wrapped(self, module: nn.Module) -> None:
        """Take note of what is there now."""
        for part in module.modules():
            self._known[part] = self._known.get(part, frozenset()) | frozenset(own_parameters(part))

    def is_late(self, module: nn.Module, name: str) -> bool:
        """Say whether a parameter was added after its model had been wrapped."""
        return bool(self._known) and name not in self._known.get(module, frozenset())


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module, Wrapper]]:
    """Yield each module once with its name and the innermost wrapper around it."""
    seen: set[int] = set()
    plain: set[type] = set()
    waiting: list[tuple[str, nn.Module, Wrapper]] = [("", root, UNWRAPPED)]
    while waiting:
        name, module, outer = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found = None if type(module) in plain else wrapper_of(module, name)
        if found is None:
            plain.add(type(module))
        wrapper = found or outer
        yield name, module, wrapper
        children = [
            (f"{name}.{key}" if name else key, child, wrapper)
            for key, child in own_modules(module).items()
            if child is not None
        ]
        waiting += reversed(children)


def is_wrapped(root: nn.Module) -> bool:
    """Say whether any module of a model is wrapped."""
    return any(wrapper is not UNWRAPPED for _, _, wrapper in walk(root))


def keeps(root: nn.Module, world: tuple[int, ...]) -> bool:
    """Say whether a wrapper of a model keeps exactly these ranks together."""
    return any(wrapper.ranks == world for _, _, wrapper in walk(root))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote, without what was put around it."""
    while True:
        inner = [name for name in own_modules(module) if not clean_name(name)]
        if len(inner) != 1 or len(own_modules(module)) != 1 or own_parameters(module):
            return module
        child = own_modules(module)[inner[0]]
        if child is None:
            return module
        module = child


def is_training(module: nn.Module) -> bool:
    """Say whether a model is in training mode.

    Lightning leaves a wrapper in the mode of its last evaluation: what is inside it trains.
    """
    return module.training or unwrapped(module).training
