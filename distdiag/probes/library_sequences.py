"""The functions of libraries by which a program splits its sequences, ready to be verified."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag.probes.sequence_libraries import (
    LIBRARIES,
    Attribute,
    Call,
    Entry,
    Exchanging,
    Slot,
    Splitting,
    Variable,
)
from distdiag.probes.token_passes import Functions
from distdiag.probes.used_groups import ranks_of
from distdiag.sequence_plan import SequencePlan

AnyFunction = Callable[..., Any]


class Unavailable(NamedTuple):
    """What a library has, and why it cannot be verified."""

    name: str
    reason: str
    is_set_up: bool


class Ready(NamedTuple):
    """Functions of a library, and the ranks of the group that they use.

    Unless `is_form_sure`, the program may use them on tensors that have heads before tokens.
    """

    entry: Entry
    functions: Functions
    members: tuple[int, ...]
    is_form_sure: bool


class _Unusable(Exception):
    """It cannot be called; `is_set_up` tells whether the program has made a group for it."""

    def __init__(self, reason: str, *, is_set_up: bool = True) -> None:
        super().__init__(reason)
        self.is_set_up = is_set_up


class _Use(NamedTuple):
    """One way in which a program uses an entry: the group, and the layer that has the indices."""

    group: Any
    members: tuple[int, ...]
    dim: int
    layer: nn.Module | None = None

    @property
    def rank(self) -> int:
        return self.members.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.members)

    def slots(self, tensor: Tensor) -> dict[Slot, Any]:
        return {
            Slot.TENSOR: tensor,
            Slot.TENSORS: [tensor],
            Slot.GROUP: self.group,
            Slot.RANK: self.rank,
            Slot.SIZE: self.size,
            Slot.LENGTH: tensor.shape[self.dim],
            Slot.DEVICE: tensor.device,
        }


def library_sequences(models: Sequence[nn.Module], mesh: object) -> Iterator[Ready | Unavailable]:
    """Yield what the table has of modules that are imported, in the order of the table.

    `mesh` is that over which torch's context parallelism cut last, None if it never did. All ranks
    of a group come to the same functions in the same order.
    """
    for entry in LIBRARIES:
        if not all(module in sys.modules for module in entry.modules):
            continue
        try:
            for use in _uses(entry, models, mesh):
                if use.size > 1:
                    is_usual = _is_usual(entry, use)
                    yield Ready(entry, _functions(entry, use), use.members, is_usual)
                else:
                    yield Unavailable(entry.name, "its group has one rank", is_set_up=False)
        except _Unusable as error:
            yield Unavailable(entry.name, str(error), error.is_set_up)


def _is_usual(entry: Entry, use: _Use) -> bool:
    if isinstance(entry, Splitting) or not entry.scattered:
        return True
    return bool(getattr(use.layer, entry.scattered) == entry.head_dim)


def plan_of(plan: SequencePlan, ready: Ready) -> SequencePlan:
    """Return with what tokens functions of a library are verified, where the plan does not say."""
    entry, size = ready.entry, len(ready.members)
    reduction = plan.reduction or entry.reduction
    plan = msgspec.structs.replace(
        plan, dim=entry.dim, length=plan.length_over(size), reduction=reduction
    )
    if isinstance(entry, Splitting):
        return msgspec.structs.replace(plan, backward=plan.backward and entry.has_backward)
    return msgspec.structs.replace(
        plan, heads=size, hidden=plan.hidden or 8, causal=False, documents=(), dtype="float32"
    )


def _uses(entry: Entry, models: Sequence[nn.Module], mesh: object) -> Iterator[_Use]:
    if entry.group.is_mesh:
        if mesh is not None:  # the module is imported by much that never cuts
            yield _use(entry, mesh)
    elif isinstance(entry, Exchanging) and entry.layer:
        yield from _layers(entry, models)
    else:
        groups = [_group(reference) for reference in entry.group.references]
        uses = [_use(entry, group) for group in groups if group is not None]
        if not uses:
            raise _Unusable("its group is not set up", is_set_up=False)
        wide = [use for use in uses if use.size > 1]
        if len(wide) > 1:
            raise _Unusable("two groups share each sequence, and no group has all of their ranks")
        yield (wide or uses)[0]


def _layers(entry: Exchanging, models: Iterable[nn.Module]) -> Iterator[_Use]:
    """Yield one use for each group and each pair of indices."""
    kind = _found(entry.layer)
    calls = (entry.to_heads, entry.to_tokens)
    attributes = [each.name for c in calls for each in c.arguments if isinstance(each, Attribute)]
    seen = set()
    for model in models:
        for layer in model.modules():
            group = getattr(layer, entry.group.attribute, None) if isinstance(layer, kind) else None
            if group is None:
                continue
            use = _use(entry, group)._replace(layer=layer)
            key = (use.members, *(getattr(layer, name) for name in attributes))
            if key not in seen:
                seen.add(key)
                yield use
    if not seen:
        raise _Unusable("no model has such a layer with a group", is_set_up=False)


def _use(entry: Entry, group: Any) -> _Use:  # noqa: ANN401 (what libraries keep as their group)
    members = ranks_of(group)
    if dist.get_rank() not in members:
        raise _Unusable("this rank is not in its group", is_set_up=False)
    return _Use(group, members, entry.dim)


def _group(reference: str) -> Any:  # noqa: ANN401
    found = _found(reference)
    if callable(found) and not isinstance(found, dist.ProcessGroup):
        found = found()
    return None if found is dist.GroupMember.NON_GROUP_MEMBER else found


def _found(reference: str) -> Any:  # noqa: ANN401
    module, _, path = reference.partition(":")
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise _Unusable(f"this version has no {reference}") from None
    return found


def _functions(entry: Entry, use: _Use) -> Functions:
    if isinstance(entry, Splitting):
        joining = _calling(entry.gather, use) if entry.gather is not None else None
        return Functions(_calling(entry.split, use), joining)
    to_heads, to_tokens = _calling(entry.to_heads, use), _calling(entry.to_tokens, use)

    def split(whole: Tensor) -> Tensor:
        return whole.chunk(use.size, entry.dim)[use.rank]

    def gather(part: Tensor) -> Any:  # noqa: ANN401
        # As many copies as there are ranks: each of them gets all heads of all tokens.
        return to_heads(torch.cat([part] * use.size, entry.head_dim))

    def attention(*parts: Tensor) -> Any:  # noqa: ANN401
        query, key, value = (to_heads(part).movedim(entry.dim, -2) for part in parts)
        mixed = _plain_attention(query, key, value)
        return to_tokens(mixed.movedim(-2, entry.dim).contiguous())

    return Functions(split, _as(to_heads, gather), _as(to_heads, attention))


def _plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax attention; written out, for nobody is to take it for the program's own."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    mixed: Tensor = weights / weights.sum(-1, keepdim=True) @ value
    return mixed


def _calling(call: Call, use: _Use) -> AnyFunction:
    """Return a function of one tensor that makes this call."""
    function = _found(call.function)

    def called(tensor: Tensor) -> Any:  # noqa: ANN401
        result = _called(call, use, tensor)
        is_one = isinstance(result, list) and len(result) == 1
        return result[0] if is_one else result

    owner = getattr(function, "__self__", None)
    return _as(getattr(owner, "forward", function), called)


def _called(call: Call, use: _Use, tensor: Tensor) -> Any:  # noqa: ANN401
    arguments = [_value(each, use, tensor) for each in call.arguments]
    options = {key: _value(each, use, tensor) for key, each in call.options}
    return _found(call.function)(*arguments, **options)


def _value(argument: object, use: _Use, tensor: Tensor) -> Any:  # noqa: ANN401
    match argument:
        case Slot():
            return use.slots(tensor)[argument]
        case Attribute():
            return getattr(use.layer, argument.name)
        case Variable():
            return _group(argument.reference)
        case Call():
            return _called(argument, use, tensor)
    return argument


def _as(original: AnyFunction, function: AnyFunction) -> AnyFunction:
    """Say of a function that it stands for that of the library."""
    function.__wrapped__ = inspect.unwrap(original)  # type: ignore[attr-defined]
    return function
