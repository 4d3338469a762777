"""Numbers of attention heads that were divided by a mesh although the weights are whole."""

from collections.abc import Iterator
from typing import Final

from torch import nn

from distdiag.probes.models.meshes import mesh_of
from distdiag.probes.models.wrappers import Tree, parameters_in
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.kinds import is_dtensor

# Projections of attention that a plan splits in the middle of a head.

_COUNTS: Final = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)


def cut_heads(parent: object, projection: object, num_parts: int) -> str:
    """Say which heads cannot be split so, an empty string if all can or nothing is known."""
    if not isinstance(projection, nn.Linear) or num_parts < 2:
        return ""
    width = projection.out_features
    counts = _counts(parent)
    head_dim = getattr(parent, "head_dim", None)
    if type(head_dim) is not int or head_dim <= 0:
        if len(counts) != 1 or width != projection.in_features:
            return ""  # the projection may be another one, or several in one
        head_dim = width // next(iter(counts))
    num_heads, rest = divmod(width, head_dim) if head_dim else (0, 1)
    if rest or num_heads not in counts or num_heads % num_parts == 0:
        return ""
    return f"{num_heads} heads of {head_dim} cannot be split over {num_parts} ranks"


def _counts(parent: object) -> set[int]:
    holders = [vars(parent), getattr(getattr(parent, "config", None), "__dict__", {})]
    values = [holder.get(name) for holder in holders for name in _COUNTS]
    return {value for value in values if type(value) is int and value > 0}


# Counts of heads, and whether one was divided.

_NAMES: Final = ("num_heads", "n_heads", "n_head", "num_attention_heads")


class HeadCounts:
    """Remembers how many heads each module had when it was first looked at."""

    def __init__(self) -> None:
        self._first: WeakMap[nn.Module, int] = WeakMap()

    def divided(self, tree: Tree) -> dict[int, int]:
        """Return by what the heads of a model's modules were divided, by the ids of their parts.

        Only where the model is sharded over a mesh axis of that size, and the module is not.
        """
        sizes = {size for parameter in parameters_in(tree) for size in _axes(parameter)}
        found: dict[int, int] = {}
        for module, whole, now in self._counts(tree):
            is_divided = whole != now and now > 0 and whole % now == 0 and whole // now in sizes
            if is_divided and not any(is_dtensor(each) for each in module.parameters()):
                found |= {id(part): whole // now for part in module.modules()}
        return found

    def _counts(self, tree: Tree) -> Iterator[tuple[nn.Module, int, int]]:
        """Yield modules with the number of heads that they should have, and that they have."""
        configured = _count(getattr(tree[0][1], "config", None))
        for _, module, _ in tree:
            now = _count(module)
            if now:
                first = self._first.setdefault(module, now)
                yield module, configured or first, now


def _count(holder: object) -> int:
    values = [getattr(holder, "__dict__", {}).get(name) for name in _NAMES]
    return next((value for value in values if type(value) is int), 0)


def _axes(parameter: object) -> tuple[int, ...]:
    return mesh_of(parameter.device_mesh).sizes if is_dtensor(parameter) else ()  # type: ignore[attr-defined]
