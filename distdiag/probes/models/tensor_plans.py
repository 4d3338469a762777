"""The plan of a model: for each of its tensors, how it is kept and which ranks hold the same."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distdiag.events.models import Policy, ReplicaEvidence, TensorPlan
from distdiag.probes.models.attention_heads import HeadCounts
from distdiag.probes.models.lost_ties import Untied
from distdiag.probes.models.meshes import mesh_of, replicas_on_mesh
from distdiag.probes.models.modules import clean_name, own_buffers, own_parameters
from distdiag.probes.models.wrappers import (
    Tree,
    Wrapper,
    WrapTimes,
    parameters_in,
    policies_of,
    sharded_parameters,
)
from distdiag.probes.tensors.kinds import is_dtensor
from distdiag.probes.untyped import Untyped

# Weights that the configuration of a model calls tied, and that are not.

_FLAG = "tie_word_embeddings"


def untied_pairs(tree: Tree) -> dict[tuple[int, str], str]:
    """Return heads that are not the embedding, by module and name, with the embedding's name.

    Only where the configuration is sure to mean them: one embedding and one linear layer of its
    shape below the module that has the flag.
    """
    found: dict[tuple[int, str], str] = {}
    for path, module, _ in tree:
        if getattr(getattr(module, "config", None), _FLAG, None) is not True:
            continue
        if hasattr(module, "get_output_embeddings"):
            found |= _declared(module, path)
            continue
        parts = list(module.named_modules())
        embeddings = [(name, part) for name, part in parts if isinstance(part, nn.Embedding)]
        for name, embedding in embeddings:
            heads = list(_heads(parts, embedding))
            alike = [part for _, part in embeddings if part.weight.shape == embedding.weight.shape]
            if len(heads) == 1 and len(alike) == 1 and heads[0].weight is not embedding.weight:
                full = f"{path}.{name}" if path else name
                found[id(heads[0]), "weight"] = clean_name(f"{full}.weight")
    return found


def _declared(module: Untyped, path: str) -> dict[tuple[int, str], str]:
    """Ask a model that knows its embedding and its head."""
    try:
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return {}
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return {}  # a wrapper that trains a copy, or none
    if head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return {}
    names = {id(part): name for name, part in module.named_modules()}
    name = names.get(id(embedding))
    if name is None:
        return {}
    full = f"{path}.{name}" if path else name
    return {(id(head), "weight"): clean_name(f"{full}.weight")}


def _heads(parts: list[tuple[str, nn.Module]], embedding: nn.Embedding) -> Iterator[nn.Linear]:
    for _, part in parts:
        if isinstance(part, nn.Linear) and part.weight.shape == embedding.weight.shape:
            yield part


# The plan of each tensor of a model.

_NOT_UNTIED: Final = Untied("")

_SHARED: Final = "shared_embedding"
"""Megatron marks the embedding of the first stage and the head of the last one so."""


class Held(NamedTuple):
    """A tensor of a model with its plan."""

    plan: TensorPlan
    tensor: torch.Tensor


class Surroundings(NamedTuple):
    """What the plan of a tensor depends on apart from its own model.

    `owners` are the optimizers of each parameter, `reduced` the ranks over which the program itself
    reduced its gradient for this step, `sent` those over which it once sent the parameter round,
    all by the id of the parameter. `heads` knows numbers of attention heads. `training_ranks` are
    those of another model that all ranks train together, `is_cut` says of a tensor that it is split
    along a sequence, `is_routing_bias` of a module and a name that experts are chosen by it.
    `lost_ties` yields what was one parameter before, and from which one it was parted; `emptied`
    returns the digest of what `to_empty` left in a tensor. Of the model itself: whether all of it
    `is_frozen`, the `mesh_ranks` over which tensors of it are sharded, whether it `has_marks` of
    Megatron's on some, whether it `is_local`, since it has stepped without a reduction of DDP's,
    and whether it `is_bypassed`, since DDP's forward pass was not called for this step.
    """

    owners: Mapping[int, tuple[str, ...]]
    reduced: Mapping[int, tuple[int, ...]]
    sent: Mapping[int, tuple[int, ...]]
    training_ranks: tuple[int, ...]
    world: tuple[int, ...]
    wrap_times: WrapTimes
    is_frozen: bool = False
    mesh_ranks: tuple[int, ...] = ()
    has_marks: bool = False
    is_local: bool = False
    is_bypassed: bool = False
    heads: HeadCounts | None = None
    is_cut: Callable[[object], bool] = lambda _: False
    is_routing_bias: Callable[[nn.Module, str], bool] = lambda *_: False
    lost_ties: Callable[[Tree], Iterator[tuple[tuple[int, str], Untied]]] = lambda _: iter(())
    emptied: Callable[[torch.Tensor], str] = lambda _: ""


class _Rest(NamedTuple):
    """What the plan of a tensor depends on in the rest of its model."""

    tree: Tree
    policies: Mapping[int, Policy]
    untied: Mapping[tuple[int, str], Untied]
    divided: Mapping[int, int]


class _Slot(NamedTuple):
    """Where a module has a tensor, and what FSDP2 has `whole` instead and has written down of it.

    `name` is as the user knows it, `first_name` that of the first slot with the same parameter.
    `is_managed`: the wrapper around it keeps it. Else it `is_late` or `is_ignored`.
    """

    module: nn.Module
    key: str
    wrapper: Wrapper
    name: str
    first_name: str
    is_parameter: bool
    tensor: torch.Tensor
    whole: torch.Tensor
    record: Any
    is_late: bool
    is_ignored: bool

    @property
    def is_managed(self) -> bool:
        return not (self.is_late or self.is_ignored)


def plan_of(tree: Tree, around: Surroundings) -> list[Held]:
    """Return all tensors of a model in the order of its modules."""
    parameters = list(parameters_in(tree))
    around = around._replace(
        is_frozen=not any(parameter.requires_grad for parameter in parameters),
        mesh_ranks=_mesh_ranks(parameters),
        has_marks=any(_is_part(parameter) for parameter in parameters),
    )
    divided = {} if around.heads is None else around.heads.divided(tree)
    untied = dict(around.lost_ties(tree))
    untied |= {place: Untied(name) for place, name in untied_pairs(tree).items()}
    rest = _Rest(tree, policies_of(tree), untied, divided)
    return [Held(_plan(slot, rest, around), slot.whole) for slot in _slots(tree, around.wrap_times)]


def _slots(tree: Tree, wrap_times: WrapTimes) -> Iterator[_Slot]:
    records = sharded_parameters(tree)
    first_names: dict[int, str] = {}
    for path, module, wrapper in tree:
        are_ignored: list[bool] = []
        for key, tensor, is_parameter in _tensors_of(module):
            record = records.get((id(module), key))
            # Between its forward and backward pass a module of FSDP2 has the gathered parameter.
            whole = tensor if record is None else record.sharded_param
            name = clean_name(f"{path}.{key}" if path else key)
            first = first_names.setdefault(id(whole), name) if is_parameter else name
            is_unknown = is_parameter and wrapper.kind == "FSDP2" and record is None
            late = is_unknown and wrap_times.is_late(module, key)
            ignored = wrapper.ignores(name, module, tensor) or (is_unknown and not late)
            if is_parameter:
                are_ignored.append(ignored)
            elif wrapper.is_sharding:
                # Wrappers are given parameters alone: buffers of ignored modules are meant, too.
                ignored = ignored or (bool(are_ignored) and all(are_ignored))
            yield _Slot(
                module,
                key,
                wrapper,
                name,
                first,
                is_parameter,
                tensor,
                whole,
                record,
                late,
                ignored,
            )


def _plan(slot: _Slot, rest: _Rest, around: Surroundings) -> TensorPlan:
    module, key, wrapper, whole = slot.module, slot.key, slot.wrapper, slot.whole
    untied = rest.untied.get((id(module), key), _NOT_UNTIED)
    plan = TensorPlan(
        name=slot.name,
        shape=_shape(slot),
        dtype=str(whole.dtype).removeprefix("torch."),
        is_parameter=slot.is_parameter,
        requires_grad=slot.is_parameter and whole.requires_grad,
        wrapper=wrapper.kind if slot.is_managed else "",
        unit=wrapper.unit,
        owners=around.owners.get(id(whole), ()),
        tied_to="" if slot.first_name == slot.name else slot.first_name,
        is_late=slot.is_late,
        untied_from=untied.name,
        untied_by=untied.call,
        heads_divided_by=rest.divided.get(id(module), 1),
        is_shared=bool(getattr(slot.tensor, _SHARED, False)),
        policy=rest.policies.get(id(slot.record), wrapper.policy),
        is_routing_bias=not whole.requires_grad
        and around.is_routing_bias(module, key)
        and (slot.is_parameter or not _is_sent(rest.tree)),
        is_ignored=slot.is_ignored,
        emptied=around.emptied(whole),
        split_over=wrapper.ranks if slot.is_parameter and _is_flat_part(slot) else (),
    )
    plan = _placed(plan, whole, wrapper, around)
    if plan.is_routing_bias and plan.evidence is ReplicaEvidence.WORLD:
        plan = _beside_router(plan, module, around)
    return plan


def _is_sent(tree: Tree) -> bool:
    """Say whether DDP gives all ranks the buffers of one before each forward pass."""
    return any(getattr(module, "broadcast_buffers", False) for _, module, _ in tree)


def _mesh_ranks(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    for parameter in parameters:
        if is_dtensor(parameter):
            return mesh_of(parameter.device_mesh).ranks  # type: ignore[attr-defined]
    return ()


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in own_parameters(module).items():
        if parameter is not None and not is_lazy(parameter):
            yield name, parameter, True
    for name, buffer in own_buffers(module).items():
        if isinstance(buffer, torch.Tensor) and not is_lazy(buffer):
            yield name, buffer, False


def _is_flat_part(slot: _Slot) -> bool:
    return slot.wrapper.kind == "FSDP1" and slot.wrapper.is_sharding and slot.is_managed


def _shape(slot: _Slot) -> tuple[int, ...]:
    if slot.record is not None:
        return tuple(slot.record._orig_size)
    if _is_flat_part(slot):
        return ()  # a part of a flat parameter, and ranks have different ones
    return tuple(getattr(slot.whole, "ds_shape", slot.whole.shape))


def _placed(
    plan: TensorPlan,
    tensor: Untyped,
    wrapper: Wrapper,
    around: Surroundings,
) -> TensorPlan:
    """Add the placement of a tensor, and which ranks hold the same."""
    if is_dtensor(tensor):
        mesh = mesh_of(tensor.device_mesh)
        placements = tuple(str(placement) for placement in tensor.placements)
        replicas = replicas_on_mesh(tensor.device_mesh, tensor.placements)
        return msgspec.structs.replace(
            plan, placements=placements, mesh=mesh, replicas=replicas, evidence=ReplicaEvidence.MESH
        )
    ranks, evidence = _kept_alike(plan, tensor, wrapper, around)
    return msgspec.structs.replace(plan, replicas=ranks, evidence=evidence)


def _kept_alike(
    plan: TensorPlan,
    tensor: object,
    wrapper: Wrapper,
    around: Surroundings,
) -> tuple[tuple[int, ...], ReplicaEvidence]:
    if plan.is_shared:
        return around.world, ReplicaEvidence.MARKED
    if _is_own(tensor):
        return (), ReplicaEvidence.OWN
    if _is_part(tensor) or around.is_cut(tensor):
        return (), ReplicaEvidence.WRAPPER
    for known, evidence in (
        (around.reduced, ReplicaEvidence.REDUCED),
        (around.sent, ReplicaEvidence.SENT),
    ):
        if _still_holds(known.get(id(tensor), ()), evidence, plan, wrapper):
            return known[id(tensor)], evidence
    if wrapper.ranks:
        return _kept_by(plan, wrapper, around)
    if around.mesh_ranks:
        return around.mesh_ranks, ReplicaEvidence.MODEL
    if around.has_marks and plan.is_parameter:
        return around.world, ReplicaEvidence.MARKED
    if around.is_frozen and around.training_ranks and plan.is_parameter:
        return around.training_ranks, ReplicaEvidence.FROZEN
    return around.world, ReplicaEvidence.WORLD


def _still_holds(
    ranks: tuple[int, ...], evidence: ReplicaEvidence, plan: TensorPlan, wrapper: Wrapper
) -> bool:
    """Say whether ranks that once shared a parameter still do, now that it has been wrapped.

    The first FSDP keeps the parameters themselves and gives each rank a piece of them. What a
    wrapper was told to ignore may be sent to all ranks before each puts its own there.
    """
    is_split = wrapper.is_sharding and bool(plan.wrapper) and plan.is_parameter
    if is_split and len(set(ranks) & set(wrapper.ranks)) > 1:
        return False
    return bool(ranks) and not (plan.is_ignored and evidence is ReplicaEvidence.SENT)


def _beside_router(plan: TensorPlan, module: nn.Module, around: Surroundings) -> TensorPlan:
    """Take a bias to be kept alike by the ranks that reduce the gradient of its router."""
    for parameter in module.parameters():
        is_router = parameter.ndim > 1 and plan.shape[-1] in parameter.shape
        if is_router and id(parameter) in around.reduced:
            ranks = around.reduced[id(parameter)]
            return msgspec.structs.replace(plan, replicas=ranks, evidence=ReplicaEvidence.REDUCED)
    return plan


def _kept_by(
    plan: TensorPlan, wrapper: Wrapper, around: Surroundings
) -> tuple[tuple[int, ...], ReplicaEvidence]:
    if plan.is_ignored:
        return (), ReplicaEvidence.WRAPPER
    if wrapper.is_sharding and plan.is_parameter and not plan.is_late:
        return (), ReplicaEvidence.WRAPPER
    if wrapper.kind != "DDP":
        return wrapper.ranks, ReplicaEvidence.WRAPPER
    if len(wrapper.ranks) == 1 < len(around.world):
        return around.world, ReplicaEvidence.LONE
    if around.is_local:
        return wrapper.ranks, ReplicaEvidence.UNSYNCED
    return (
        wrapper.ranks,
        ReplicaEvidence.BYPASSED if around.is_bypassed else ReplicaEvidence.WRAPPER,
    )


def _is_part(tensor: object) -> bool:
    """Say whether DeepSpeed or Megatron mark it as one rank's own part."""
    return _is_own(tensor) or bool(getattr(tensor, "tensor_model_parallel", False))


def _is_own(tensor: object) -> bool:
    """Say whether it is marked as what only ranks with the same experts hold."""
    return getattr(tensor, "allreduce", True) is False


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def address_of(tensor: torch.Tensor) -> int | None:
    """Return where the tensor lies, None if it lies nowhere."""
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None
