"""Says whether second sets of weights in checkpoints, such as averages, go on after a resume.

A file holds the weights A of a model and, under the same names, other ones B. When the program
saves again, it holds A' and B' in their places. An average that goes on keeps a share of B, and one
that was made anew from the model keeps a share of A instead: B' - A' = alpha (B - A') +
beta (A - A'), which least squares over some elements tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import torch

from distdiag.events.base import CallSite
from distdiag.probes.models.modules import clean_name
from distdiag.probes.models.tensor_plans import address_of
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.tensors.bytes import is_readable, sample
from distdiag.probes.tensors.content import Pending, contents
from distdiag.probes.tensors.kinds import is_dtensor

_DEEPEST: Final = 4
"""`state["trainer"]["ema"]["module"]` is three mappings deep; one more is to spare."""
_MOST_GROUPS: Final = 32
_MOST_TENSORS: Final = 8
_MOST_VALUES: Final = 1024
"""These bound what a load costs: of each set of weights so many values are kept, 64 KiB."""
_LEAST_ELEMENTS: Final = 16
"""Smaller tensors are counters, scales and the like, and no weights."""
_MOST_FILES: Final = 4
"""A resume reads one file, or one for each part of the state; the newest ones are kept."""

_Group = Mapping[str, torch.Tensor]
_Kind = frozenset[tuple[str, tuple[int, ...]]]


class _Set(NamedTuple):
    """What is kept of tensors that a file holds in one place: some values, not themselves."""

    kind: _Kind
    addresses: frozenset[int]
    values: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class _Second:
    """Weights of a file that were never loaded, and those of the same names that were."""

    path: str
    first_path: str
    addresses: frozenset[int]
    seconds: Mapping[str, torch.Tensor]
    firsts: Mapping[str, torch.Tensor]
    site: CallSite


@dataclass(slots=True)
class _File:
    """The sets of tensors of a file that was read, by where in it they are."""

    sets: Mapping[str, _Set]
    site: CallSite
    loaded: set[str] = field(default_factory=set)


class Kept(NamedTuple):
    """What a save holds in the place of a second set of weights.

    `share_of_file` and `share_of_start` are alpha and beta above, `likeness` is the square of the
    cosine between what they are shares of.
    """

    path: str
    first_path: str
    num_tensors: int
    share_of_file: float
    share_of_start: float
    likeness: float
    site: CallSite


class Averages:
    """Follows second sets of weights from a load to the next save."""

    def __init__(self) -> None:
        self._files: deque[_File] = deque(maxlen=_MOST_FILES)
        self._seconds: list[_Second] = []
        self._waiting: list[tuple[_Second, Pending]] = []

    def read(self, found: object, site: CallSite) -> None:
        """Take note of what a file holds; a file with one set of weights is of no interest."""
        groups = dict(islice(_groups(found, "", _DEEPEST), _MOST_GROUPS))
        kinds = [_kind(group) for group in groups.values()]
        sets = {
            path: _Set(kind, _addresses(group.values()), _some(group))
            for (path, group), kind in zip(groups.items(), kinds, strict=True)
            if kinds.count(kind) > 1
        }
        if sets:
            self._files.append(_File(sets, site))

    def gave(self, given: Mapping[str, Any]) -> None:
        """Take note of tensors that were given to a model."""
        tensors = (each for each in given.values() if isinstance(each, torch.Tensor))
        addresses = _addresses(tensors) if self._files or self._seconds else frozenset()
        for file in self._files:
            file.loaded |= {p for p, own in file.sets.items() if own.addresses & addresses}
        # A program may load an average late, such as with its first update.
        self._seconds = [each for each in self._seconds if not each.addresses & addresses]

    def start(self) -> None:
        """Forget what was loaded, and files of which nothing was: training begins."""
        loaded = {path for file in self._files for path in file.loaded}  # it may be read twice
        for file in self._files:
            for first in file.loaded:
                own = file.sets[first]
                for path in file.sets.keys() - loaded:
                    other = file.sets[path]
                    if other.kind == own.kind and _differ(own, other):
                        self._seconds.append(_second(path, first, file))
        self._files.clear()

    def saved(self, state: object) -> None:
        """Compare what is saved in the same places."""
        if not self._seconds:
            return
        groups = dict(islice(_groups(state, "", _DEEPEST), _MOST_GROUPS))
        rest = []
        for each in self._seconds:
            first, second = groups.get(each.first_path, {}), groups.get(each.path, {})
            if all(name in first and name in second for name in each.firsts):
                pending = contents(_products(each, first, second))
                pending.guard()
                self._waiting.append((each, pending))
            else:
                rest.append(each)
        self._seconds = rest

    def settle(self) -> Iterator[Kept]:
        """Yield what has been read by now."""
        rest = []
        for each, pending in self._waiting:
            found = pending.take()
            if found is None:
                rest.append((each, pending))
                continue
            products = [0.0 if one is None else one.mean for one in found]
            shares = _solved(*products)
            if shares is not None:
                yield Kept(each.path, each.first_path, len(each.firsts), *shares, each.site)
        self._waiting = rest


def _second(path: str, first: str, file: _File) -> _Second:
    own, other = file.sets[first], file.sets[path]
    return _Second(path, first, other.addresses, other.values, own.values, file.site)


def _groups(value: object, path: str, depth: int) -> Iterator[tuple[str, _Group]]:
    """Yield the mappings of names to weights in a state; what optimizers hold is none."""
    if not depth or not isinstance(value, Mapping) or "param_groups" in value:
        return
    tensors = {clean_name(str(k)): each for k, each in value.items() if _is_weight(each)}
    if tensors:
        yield path, tensors
    for key, item in value.items():
        yield from _groups(item, f"{path}.{key}" if path else str(key), depth - 1)


def _is_weight(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or is_dtensor(value):
        return False
    is_number = value.is_floating_point() and value.numel() >= _LEAST_ELEMENTS
    return is_number and is_readable(value)


def _kind(group: _Group) -> _Kind:
    return frozenset((name, tuple(tensor.shape)) for name, tensor in group.items())


def _addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset({address_of(tensor) or 0 for tensor in tensors} - {0})


def _some(group: _Group) -> dict[str, torch.Tensor]:
    """Return some values of some tensors that are on the CPU."""
    names = sorted(name for name, tensor in group.items() if tensor.device.type == "cpu")
    step = max(1, -(-len(names) // _MOST_TENSORS))
    with out_of_sight():
        return {name: _values(group[name]).clone() for name in names[::step]}


def _differ(one: _Set, other: _Set) -> bool:
    if not one.values or one.values.keys() != other.values.keys():
        return False
    with out_of_sight():
        return any(not torch.equal(one.values[name], other.values[name]) for name in one.values)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return sample(tensor.detach())[:_MOST_VALUES].to(torch.float64)


def _products(each: _Second, first: _Group, second: _Group) -> list[torch.Tensor]:
    """Return the inner products that least squares need, on the device of what is saved."""
    sums: list[Any] = [0.0] * 5
    with out_of_sight():
        for name, old_first in each.firsts.items():
            here = _values(first[name])
            device = here.device
            p = _values(second[name]).to(device, non_blocking=True) - here
            q = each.seconds[name].to(device, non_blocking=True) - here
            r = old_first.to(device, non_blocking=True) - here
            pairs = (q, q), (r, r), (q, r), (p, q), (p, r)
            sums = [total + (a @ b).to(device) for total, (a, b) in zip(sums, pairs, strict=True)]
        return [total.reshape(1) for total in sums]


def _solved(
    qq: float, rr: float, qr: float, pq: float, pr: float
) -> tuple[float, float, float] | None:
    """Return both shares, and how alike the two directions are; None if nothing has changed."""
    area = qq * rr - qr * qr
    if area <= 0:
        return None
    return (pq * rr - pr * qr) / area, (pr * qq - pq * qr) / area, qr * qr / (qq * rr)
