"""What loads into models have left out, decided when training begins."""

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.probes.models.modules import Slot, clean_name, slots_of
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.models.wrappers import unwrapped
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Content, Pending, contents

# Why names of a checkpoint and names of a model do not meet: another prefix, or a hole.

Shape = tuple[int, ...]

_DEEPEST: Final = 3
_MOST_PREFIXES: Final = 8
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


class Renaming(NamedTuple):
    """Names that meet when one prefix is replaced by another one."""

    given_prefix: str
    wanted_prefix: str
    names: tuple[str, ...]
    """The names as the model has them."""


NO_RENAMING: Final = Renaming("", "", ())


def renaming(unexpected: Mapping[str, Shape], missing: Mapping[str, Shape]) -> Renaming:
    """Return the change of prefix by which most of what was given finds a place."""
    best = NO_RENAMING
    for given in _prefixes(unexpected):
        parts = [(n.removeprefix(given), s) for n, s in unexpected.items() if n.startswith(given)]
        for wanted in _prefixes(missing):
            if given != wanted and len(parts) > len(best.names):
                names = [
                    wanted + rest for rest, shape in parts if _fits(missing, wanted + rest, shape)
                ]
                if len(names) > len(best.names):
                    best = Renaming(given, wanted, tuple(names))
    return best


def holes(missing: Mapping[str, Shape], loaded: Mapping[str, Shape]) -> Iterator[str]:
    """Yield what is missing between two loaded ones that differ from it in a number only."""
    places: defaultdict[tuple[str, Shape], list[tuple[int, ...]]] = defaultdict(list)
    for name, shape in loaded.items():
        pattern, numbers = _pattern(name)
        places[pattern, shape].append(numbers)
    for name, shape in missing.items():
        pattern, numbers = _pattern(name)
        others = places.get((pattern, shape), ())
        if numbers and any(each < numbers for each in others) and any(n > numbers for n in others):
            yield name


def _prefixes(names: Iterable[str]) -> list[str]:
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")[:-1]
        counts.update(
            ".".join(parts[:depth]) + "." for depth in range(1, 1 + min(len(parts), _DEEPEST))
        )
    return ["", *(prefix for prefix, _ in counts.most_common(_MOST_PREFIXES))]


def _fits(missing: Mapping[str, Shape], name: str, shape: Shape) -> bool:
    return missing.get(name) == shape


def _pattern(name: str) -> tuple[str, tuple[int, ...]]:
    return _NUMBER.sub("#", name), tuple(int(each) for each in _NUMBER.findall(name))


# Decides, when training begins, what the loads have left out.

MOST_NAMES: Final = 32
_MOST_BYTES: Final = 1 << 28
_ERRORS: Final = {
    "missing": re.compile(r"^\s*Missing key\(s\) in state_dict: (.*)$", re.MULTILINE),
    "unexpected": re.compile(r"^\s*Unexpected key\(s\) in state_dict: (.*)$", re.MULTILINE),
}
_MISMATCH: Final = re.compile(r"^\s*size mismatch for ([^:\s]+):", re.MULTILINE)
_QUOTED: Final = re.compile(r'"([^"]+)"')


class Outcome(NamedTuple):
    """Which names a load has left out."""

    missing: frozenset[str]
    unexpected: frozenset[str]
    is_refused: bool = False


def outcome_of(result: object) -> Outcome:
    """Read what `load_state_dict` returns."""
    missing = frozenset(getattr(result, "missing_keys", ()))
    return Outcome(missing, frozenset(getattr(result, "unexpected_keys", ())))


def refusal_of(error: BaseException) -> Outcome | None:
    """Read what a load that raises says of the names; what fits has been loaded all the same."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "Error(s) in loading state_dict" not in text:
        return None
    found = {
        kind: frozenset(name for line in pattern.findall(text) for name in _QUOTED.findall(line))
        for kind, pattern in _ERRORS.items()
    }
    missing = found["missing"] | frozenset(_MISMATCH.findall(text))
    return Outcome(missing, found["unexpected"], is_refused=True)


@dataclass(slots=True)
class _Missing:
    name: str
    slot: Slot
    shape: Shape
    num_bytes: int
    tensor: weakref.ref[torch.Tensor]
    version: int
    content: Pending | None


@dataclass(slots=True)
class _Load:
    module: weakref.ref[nn.Module]
    target: str
    missing: list[_Missing]
    shapes: dict[str, Shape]
    num_bytes: int
    num_given: int
    unexpected: dict[str, Shape]
    is_refused: bool
    at_step: int
    site: CallSite


class ModelLoads:
    """The loads of a process into its modules, and which of their tensors one has written."""

    def __init__(self) -> None:
        self._written: WeakMap[nn.Module, dict[str, int]]
        self._written = WeakMap()
        self._open: dict[int, _Load] = {}
        self.count = 0
        """How many loads there were."""

    def wrote(self, slot: Slot, since: int = 0) -> bool:
        """Say whether a load after so many others has written what is at this place."""
        return self._written.get(slot.owner() or _NOBODY, {}).get(slot.name, 0) > since

    def add(
        self,
        module: nn.Module,
        given: Mapping[str, Any],
        outcome: Outcome,
        at_step: int,
        site: CallSite,
    ) -> None:
        """Take note of a load that has just ended."""
        self.count += 1
        found = list(slots_of(module))
        written = [each for each in found if each[0] not in outcome.missing]
        for _, slot, _ in written:
            self._mark(slot)
        fresh = {id(tensor) for _, _, tensor in written}
        missing = [
            each
            for each in found
            if each[0] in outcome.missing and id(each[2]) not in fresh and not self.wrote(each[1])
        ]
        before = self._open.pop(id(module), None)
        if not missing:
            return
        shapes = {name: tuple(tensor.shape) for name, _, tensor in found}
        was_refused = before is not None and before.module() is module and before.is_refused
        self._open[id(module)] = _Load(
            weakref.ref(module),
            type(unwrapped(module)).__name__,
            list(_observe(missing)),
            shapes,
            sum(tensor.nbytes for _, _, tensor in found),
            sum(isinstance(each, torch.Tensor) for each in given.values()),
            {n: _shape(given[n]) for n in sorted(outcome.unexpected) if n in given},
            outcome.is_refused or was_refused,
            at_step,
            site,
        )

    def mark(self, slots: Iterable[Slot]) -> None:
        """Take note that something else than `load_state_dict` has written here."""
        self.count += 1
        for slot in slots:
            self._mark(slot)

    def _mark(self, slot: Slot) -> None:
        owner = slot.owner()
        if owner is not None:
            self._written.setdefault(owner, {})[slot.name] = self.count

    @property
    def is_unsettled(self) -> bool:
        """Whether anything was loaded since the last time."""
        return bool(self._open)

    def settle(self) -> Iterator[tuple[dict[str, Any], CallSite]]:
        """Yield, for each load since the last time, the fields of what it has left out."""
        loads = list(self._open.values())
        self._open.clear()
        for load in loads:
            fields = self._fields(load)
            if fields:
                yield fields, load.site

    def _fields(self, load: _Load) -> dict[str, Any]:
        module = load.module()
        if module is None:
            return {}
        tensors = {id(t) for _, slot, t in slots_of(module) if self.wrote(slot)}
        rest = [
            m for m in load.missing if not self.wrote(m.slot) and id(m.slot.tensor()) not in tensors
        ]
        untouched = {each.name: _is_untouched(each) for each in rest}
        rest = [each for each in rest if untouched[each.name] is not False]
        if not rest:
            return {}
        names = {each.name for each in rest}
        missing = {each.name: each.shape for each in rest}
        loaded = {n: s for n, s in load.shapes.items() if n not in {m.name for m in load.missing}}
        change: Renaming = renaming(load.unexpected, missing)
        sizes = {each.name: each.num_bytes for each in rest}
        return {
            "target": load.target,
            "num_tensors": len(load.shapes),
            "num_bytes": load.num_bytes,
            "num_given": load.num_given,
            "num_loaded": sum(self.wrote(slot) for _, slot, _ in slots_of(module)),
            "missing": _some(n for n in load.shapes if n in names),
            "num_missing": len(rest),
            "missing_bytes": sum(sizes.values()),
            "num_untouched": sum(untouched[name] is True for name in names),
            "num_unknown": sum(untouched[name] is None for name in names),
            "unexpected": _some(iter(load.unexpected)),
            "num_unexpected": len(load.unexpected),
            "given_prefix": change.given_prefix,
            "wanted_prefix": change.wanted_prefix,
            "num_renamed": len(change.names),
            "renamed_bytes": sum(sizes[name] for name in change.names),
            "holes": tuple(holes(missing, loaded))[:MOST_NAMES],
            "is_refused": load.is_refused,
            "at_step": load.at_step,
        }


_NOBODY: Final = nn.Module()


def _observe(missing: Sequence[tuple[str, Slot, torch.Tensor]]) -> Iterator[_Missing]:
    num_bytes = 0
    for name, slot, tensor in missing:
        if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
            continue  # whoever uses the model must fill it first
        local = local_part(tensor)
        num_bytes += local.nbytes
        pending = contents([local]) if num_bytes <= _MOST_BYTES else None
        if pending is not None:
            pending.guard()
        shape = tuple(tensor.shape)
        yield _Missing(
            name, slot, shape, tensor.nbytes, weakref.ref(tensor), tensor._version, pending
        )


def _is_untouched(missing: _Missing) -> bool | None:
    """Say whether a tensor holds what it held, None if that is not known."""
    now = missing.slot.tensor()
    if now is None:
        return False  # it was taken out of the model
    before = None if missing.content is None else missing.content.take()
    if before and before[0] is not None and tuple(now.shape) == missing.shape:
        pending = contents([local_part(now)])
        pending.guard()
        after = pending.take()
        if after and after[0] is not None and _are_alike(before[0], after[0]):
            return after[0].digest == before[0].digest
    if missing.tensor() is not now:
        return None
    return now._version == missing.version


def _are_alike(before: Content, after: Content) -> bool:
    """Say whether two digests can be compared: of as many elements, read by the same device."""
    return before.num_elements == after.num_elements and before.digest[0] == after.digest[0]


def _shape(value: object) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _some(names: Iterator[str]) -> tuple[str, ...]:
    return tuple(clean_name(name) or name for name in names)[:MOST_NAMES]
