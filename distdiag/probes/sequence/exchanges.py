"""Recognises exchanges around attention, by which ranks share sequences.

They share them if the module that computes attention exchanges as many elements between ranks as
its query has, or passes something on to the next rank of a ring. Experts are exchanged in a module
of their own, and data parallelism exchanges nothing in a forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch

from distdiag.events.base import CallSite
from distdiag.events.sequences import UseKind
from distdiag.probes.data.forward_arguments import TORCH
from distdiag.probes.data.padding_masks import PaddingReading
from distdiag.probes.out_of_sight import out_of_sight
from distdiag.probes.sequence.attention_calls import Attention
from distdiag.probes.sequence.attention_masks import MaskReading
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.tensors.content import Pending, contents

# Where in the program a call stands, and which module makes it.

_MOST_FRAMES: Final = 60
_SELF: Final = ("self",)

Line = tuple[CodeType, int]


class Place(NamedTuple):
    """Where a call stands: the functions that are running, and the lines at which they are.

    `offsets` say for each of them how far it has come in its code.
    """

    codes: frozenset[CodeType]
    lines: tuple[Line, ...]
    scope: CodeType | None
    is_module: bool
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, frame: FrameType | None) -> Place:
        """Look at the functions up from this frame; `scope` is the innermost module's forward."""
        lines: list[Line] = []
        offsets: list[int] = []
        scope: CodeType | None = None
        own: CodeType | None = None
        while frame is not None and len(lines) < _MOST_FRAMES:
            code = frame.f_code
            if not code.co_filename.startswith(TORCH):
                lines.append((code, frame.f_lineno))
                offsets.append(frame.f_lasti)
                own = own or code
                if scope is None and code.co_name == "forward" and code.co_varnames[:1] == _SELF:
                    scope = code
            frame = frame.f_back
        codes = frozenset(code for code, _ in lines)
        return cls(codes, tuple(lines), scope or own, scope is not None, tuple(offsets))

    def offset_in(self, scope: CodeType | None) -> int:
        """Return how far the innermost call of a function has come; -1 if none is running."""
        known = zip(self.lines, self.offsets, strict=False)
        return next((offset for (code, _), offset in known if code is scope), -1)


# Recognises which exchanges belong to attention.

MOST_READ: Final = 8
"""The contents of so many exchanges are read in a forward pass."""
_MOST_OPEN: Final = 32
_MOST_USES: Final = 128
_MOST_ROWS: Final = 4096
_ROUNDING: Final = 1e-6
_FEWEST_SUMMED_DIMS: Final = 2
"""Counts and losses have fewer."""


@dataclass(slots=True)
class Exchange:
    """A call that sends parts of tensors to other ranks."""

    kind: UseKind
    place: Place
    members: tuple[int, ...]
    size: int
    peer: int
    width: int
    content: Pending | None
    is_permuted: bool = False

    def serves(self, place: Place) -> bool:
        """Say whether the module that computes attention at a place exchanges for it.

        An all-to-all may give all to one rank by chance, in a module that the other one calls. What
        is exchanged further down is for something else, such as experts after attention, unless
        messages go round a ring.
        """
        scope = place.scope
        if self.is_permuted:
            return self.place.scope is scope
        is_before = self.place.offset_in(scope) <= place.offset_in(scope)
        return scope in self.place.codes and (self.kind == "ring" or is_before)


@dataclass(slots=True)
class Use:
    """Attention over parts that were exchanged before it, and what is being read of it."""

    kind: UseKind
    attention: Attention
    place: Place
    members: tuple[int, ...]
    before: list[Exchange]
    site: CallSite
    is_returned: bool = False
    lines: set[tuple[Line, ...]] = field(default_factory=set)
    positions: Pending | None = None
    doubt: str = ""
    mask: MaskReading | None = None
    padding: PaddingReading | None = None

    @property
    def num_queries(self) -> int:
        """How many tokens of a sequence this rank holds."""
        number = self.attention.num_queries
        is_whole = self.kind == "all_to_all" and not self.attention.members
        return number // len(self.members) if is_whole else number

    @property
    def pending(self) -> Iterator[Pending]:
        """What is read."""
        found = [self.positions, *(each.content for each in self.before)]
        found += [each.pending for each in (self.mask, self.padding) if each is not None]
        yield from (each for each in found if each is not None)

    def place_tokens(self, positions: Sequence[torch.Tensor], doubt: str) -> None:
        """Begin to read the positions of the tokens, which may be right in spite of a doubt."""
        if positions:
            self.doubt = doubt
            self.positions = contents(positions)
            self.positions.guard()

    def has_heads(self, shape: torch.Size) -> bool:
        """Say whether a tensor holds what the heads of one rank gave, side by side."""
        heads, width = self.attention.num_heads, self.attention.width or self.before[0].width
        return shape[-1] == heads * width or tuple(shape[-2:]) == (heads, width)

    def is_around(self, place: Place) -> bool:
        """Say whether a later call stands in the module that computed this attention."""
        return self.place.scope in place.codes and place.lines not in self.lines


@dataclass(slots=True)
class Inner:
    """A call of attention over DTensors, within which ranks exchange what they need."""

    attention: Attention
    place: Place
    site: CallSite
    is_used: bool = False

    def holds(self, place: Place, members: tuple[int, ...]) -> bool:
        """Say whether an exchange among these ranks is a part of this call."""
        is_theirs = set(members) == set(self.attention.members)
        return is_theirs and bool(self.place.lines) and self.place.lines[0] in place.lines


class ForwardPass:
    """What one thread exchanges and attends to, until the backward pass."""

    def __init__(self) -> None:
        self._inner: Inner | None = None
        self._open: deque[Exchange] = deque(maxlen=_MOST_OPEN)
        self._uses: list[Use] = []
        self._num_read = 0

    def read(self, tensors: Sequence[torch.Tensor], width: int = 0) -> Pending | None:
        """Begin to read what is exchanged, if this is one of the first exchanges.

        A buffer of one dimension has rows of this width.
        """
        if self._num_read >= MOST_READ or not all(map(is_readable, tensors)):
            return None
        self._num_read += 1
        with out_of_sight():
            rows = [each.reshape(-1, width) if width else each for each in tensors]
            found = contents([*tensors, num_distinct(rows)])
        found.guard()
        return found

    def inner_of(self, place: Place, members: tuple[int, ...]) -> Inner | None:
        """Return the call of attention that an exchange among these ranks is a part of."""
        inner = self._inner
        return inner if inner is not None and inner.holds(place, members) else None

    def add(self, exchange: Exchange) -> bool:
        """Take note of an exchange that is about to begin; say if it is a part of attention.

        Only the first one is asked for that, and only in the first call of a pass.
        """
        inner = self.inner_of(exchange.place, exchange.members)
        if inner is None:
            if not self.returned(exchange.place) or exchange.kind == "all_gather":
                self._open.append(exchange)
            return False
        return self._use(inner, exchange)

    def _use(self, inner: Inner, exchange: Exchange) -> bool:
        if inner.is_used or len(self._uses) >= _MOST_USES:
            return False
        inner.is_used = True
        kind, members = exchange.kind, exchange.members
        self._uses.append(Use(kind, inner.attention, inner.place, members, [exchange], inner.site))
        return len(self._uses) == 1

    def returned(self, place: Place) -> bool:
        """Say whether a call brings back what the last attention made of the parts."""
        last = self._uses[-1] if self._uses else None
        if last is None or not last.is_around(place):
            return False
        last.is_returned = True
        return last.kind == "all_to_all"

    def combined(self, public: str, given: torch.Tensor, members: tuple[int, ...]) -> None:
        """Take note of a call anywhere that makes a whole of what each rank's heads gave.

        What is linear may be applied to the heads of each rank, and summed up over the ranks; and
        heads may be gathered when their tokens have been summed up.
        """
        last = self._uses[-1] if self._uses else None
        if last is None or members != last.members or given.ndim < _FEWEST_SUMMED_DIMS:
            return
        is_summed = public.startswith(("all_reduce", "reduce")) and given.is_floating_point()
        is_gathered = public.startswith("all_gather") and last.has_heads(given.shape)
        last.is_returned = last.is_returned or is_summed or is_gathered

    def attend(self, attention: Attention, place: Place, site: CallSite) -> bool:
        """Take note of attention that is about to be computed; say if it is the first that fits."""
        self._inner = Inner(attention, place, site) if attention.members else None
        if attention.members:
            return False
        mine = [each for each in self._open if each.serves(place)]
        mine = mine or [each for each in self._open if _is_inside(place, each)]
        for each in mine:
            self._open.remove(each)
        if not mine or len(self._uses) >= _MOST_USES:
            return False
        last = mine[-1]
        before = [each for each in mine if (each.kind, each.members) == (last.kind, last.members)]
        if not _fits(attention, place, before):
            return False
        if place.scope not in last.place.codes:
            place = place._replace(scope=last.place.scope)
        use = Use(last.kind, attention, place, last.members, before, site)
        use.lines = {each.place.lines for each in before}
        self._uses.append(use)
        return len(self._uses) == 1

    @property
    def last(self) -> Use:
        """What was attended to last."""
        return self._uses[-1]

    def take(self) -> list[Use]:
        """Return the uses of the pass that is over, and begin anew."""
        uses, self._uses = self._uses, []
        self._open.clear()
        self._inner, self._num_read = None, 0
        return uses


def _is_inside(place: Place, exchange: Exchange) -> bool:
    """Say whether attention is computed by a module that is called by the one which exchanges.

    It has to do so further down: a layer may send tokens to experts after attention.
    """
    if exchange.kind == "ring" or not exchange.place.is_module:
        return False
    scope = exchange.place.scope
    here, there = (
        next((line for code, line in lines if code is scope), -1)
        for lines in (place.lines, exchange.place.lines)
    )
    return here >= there >= 0


def _fits(attention: Attention, place: Place, before: Sequence[Exchange]) -> bool:
    """Say whether what was exchanged before is what the attention works on."""
    sizes = {each.size for each in before}
    match before[-1].kind:
        case "ring":
            return place.is_module
        case "all_gather":
            key, value = attention.sizes[1:] or (0, 0)
            is_longer = attention.num_keys == len(before[-1].members) * attention.num_queries
            return is_longer and (not key or bool(sizes & {key, value, key + value}))
    if attention.sizes:
        return bool(sizes & {attention.sizes[0], sum(attention.sizes)})
    if attention.num_queries != attention.num_keys:
        return False  # scores that choose experts, maybe
    unit = attention.unit
    return any(size > unit > 0 and size % unit == 0 for size in sizes)


def num_distinct(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Count the rows that differ, without a wait; -1 in place of what has no rows."""
    first = tensors[0].detach()
    if not first.is_floating_point() or not first.ndim or not first.numel():
        return torch.full((1,), -1.0)
    width = first.shape[-1]
    rows = torch.cat([each.detach().reshape(-1, width)[:_MOST_ROWS].double() for each in tensors])
    weights = torch.arange(1, width + 1, device=rows.device, dtype=rows.dtype).sin()
    sums = (rows * weights).sum(-1).sort().values
    room = _ROUNDING * sums.abs().amax()
    return 1.0 + (sums[1:] - sums[:-1] > room).sum(dtype=torch.float64).reshape(1)
