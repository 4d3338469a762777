"""The functions of a library by which a program splits its sequences, ready to be verified.

No library is known here by its name: the table comes from `frameworks`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag.config.subjects import SequenceConfig
from distdiag.events.sequences import Reduction
from distdiag.probes.collectives.used_groups import ranks_of
from distdiag.probes.sequence.token_passes import Functions
from distdiag.probes.untyped import Untyped

AnyFunction = Callable[..., Any]

# How a library's functions are described.


class Slot(Enum):
    """An argument that is known only when a function is called."""

    TENSOR = auto()
    TENSORS = auto()
    GROUP = auto()
    RANK = auto()
    SIZE = auto()
    LENGTH = auto()
    DEVICE = auto()


class Attribute(NamedTuple):
    """An argument that is an attribute of the layer which exchanges."""

    name: str


class Variable(NamedTuple):
    """An argument that is what a library keeps under this reference."""

    reference: str


class Call(NamedTuple):
    """A function and its arguments: one of the kinds above, another `Call`, or the value itself."""

    function: str
    arguments: tuple[object, ...]
    options: tuple[tuple[str, object], ...] = ()


class GroupOf(NamedTuple):
    """Where the group is: at references, as an attribute of the layer, or under torch's mesh.

    Of several groups that is meant which alone has more than one rank.
    """

    references: tuple[str, ...] = ()
    attribute: str = ""
    is_mesh: bool = False


class Splitting(NamedTuple):
    """Functions that take a rank's part of a whole along `dim`, and join the parts again.

    Without `gather` the library has none. `reduction` is what has to happen to the gradients of
    parameters over the group; without `has_backward` no gradient comes back.
    """

    split: Call
    gather: Call | None
    group: GroupOf
    dim: int
    reduction: Reduction = ""
    has_backward: bool = True

    @property
    def modules(self) -> tuple[str, ...]:
        """Which modules the program has imported if it uses them."""
        return tuple(_module(call.function) for call in (self.split, self.gather) if call)

    @property
    def name(self) -> str:
        """The functions."""
        return ", ".join(call.function for call in (self.split, self.gather) if call)


class Exchanging(NamedTuple):
    """Functions that change heads for tokens before attention, and back again behind it.

    `layer` is the module that calls them; its instances tell the group and the indices, of which
    `scattered` is that of the heads.
    """

    to_heads: Call
    to_tokens: Call
    group: GroupOf
    dim: int
    head_dim: int
    layer: str = ""
    scattered: str = ""
    reduction: Reduction = "mean"

    @property
    def modules(self) -> tuple[str, ...]:
        """Which modules the program has imported if it uses them."""
        return (_module(self.layer or self.to_heads.function),)

    @property
    def name(self) -> str:
        """The layer, or the functions."""
        return self.layer or f"{self.to_heads.function}, {self.to_tokens.function}"


Entry = Splitting | Exchanging


def _module(reference: str) -> str:
    return reference.partition(":")[0]


# How they are found in the program that runs.


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


def library_sequences(
    table: Sequence[Entry], models: Sequence[nn.Module], mesh: object
) -> Iterator[Ready | Unavailable]:
    """Yield what a table has of modules that are imported, in the order of the table.

    `mesh` is that over which torch's context parallelism cut last, None if it never did. All ranks
    of a group come to the same functions in the same order.
    """
    for entry in table:
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


def config_of(config: SequenceConfig, ready: Ready) -> SequenceConfig:
    """Return with what tokens functions of a library are verified, unless the config says so."""
    entry, size = ready.entry, len(ready.members)
    reduction = config.reduction or entry.reduction
    config = msgspec.structs.replace(
        config, dim=entry.dim, length=config.length_over(size), reduction=reduction
    )
    if isinstance(entry, Splitting):
        return msgspec.structs.replace(config, backward=config.backward and entry.has_backward)
    return msgspec.structs.replace(
        config, heads=size, hidden=config.hidden or 8, causal=False, documents=(), dtype="float32"
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


def _use(entry: Entry, group: object) -> _Use:
    members = ranks_of(group)
    if dist.get_rank() not in members:
        raise _Unusable("this rank is not in its group", is_set_up=False)
    return _Use(group, members, entry.dim)


def _group(reference: str) -> object:
    found = _found(reference)
    if callable(found) and not isinstance(found, dist.ProcessGroup):
        found = found()
    return None if found is dist.GroupMember.NON_GROUP_MEMBER else found


def _found(reference: str) -> Untyped:
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

    def gather(part: Tensor) -> object:
        # As many copies as there are ranks: each of them gets all heads of all tokens.
        return to_heads(torch.cat([part] * use.size, entry.head_dim))

    def attention(*parts: Tensor) -> object:
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

    def called(tensor: Tensor) -> Untyped:
        result = _called(call, use, tensor)
        is_one = isinstance(result, list) and len(result) == 1
        return result[0] if is_one else result

    original: Untyped = getattr(getattr(function, "__self__", None), "forward", function)
    return _as(original, called)


def _called(call: Call, use: _Use, tensor: Tensor) -> Untyped:
    arguments = [_value(each, use, tensor) for each in call.arguments]
    options = {key: _value(each, use, tensor) for key, each in call.options}
    return _found(call.function)(*arguments, **options)


def _value(argument: object, use: _Use, tensor: Tensor) -> Untyped:
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
