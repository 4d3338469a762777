"""Lines of a trainer of one's own: any that name a step or an epoch, and a number that is a metric.

Each number has the name that stands before it: ``Epoch [1/10], Step [100/600], Loss: 0.5``.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from distdiag.metrics.readers.lines import LineFormat, Parsed
from distdiag.metrics.readers.numbers import NUMBER, UNIT, scaled

_CLOCK: Final = re.compile(r"\d{4}-\d\d-\d\d|(?<![\d.])\d{1,3}+:\d\d(?::\d\d)?+(?:[.,]\d{1,9}+)?")
# Where a number may begin; the search for a class of characters is quick, that for a number slow.
_BEGIN: Final = re.compile(r"[-+.\dnNiI](?<![\w.@/-].)")
_NUMBER: Final = re.compile(rf"({NUMBER})({UNIT})?+( ?/ ?\d++)?(?!\w)")
# What parts a name from what stands before it.
_PART: Final = re.compile(r"[,;|()\[\]{}<>\t]|\s-\s|:\s|\s{2,}")
_LONGEST_NAME: Final = 60

_LONGEST_LINE: Final = 4096
_MOST_RANKS: Final = 1 << 20


class _Kind(Enum):
    EPOCH = auto()
    STEP = auto()
    GLOBAL_STEP = auto()
    RANK = auto()
    METRIC = auto()
    NAMELESS = auto()
    OTHER = auto()


class _Name(NamedTuple):
    """What stands before a number: its name, and how long before the number that begins."""

    kind: _Kind
    text: str
    length: int


_BEFORE: Final = r"(?:^|.*[\s_/])"
_KINDS: Final = (
    (_Kind.EPOCH, re.compile(_BEFORE + r"(?:epochs?|ep)$")),
    (
        _Kind.GLOBAL_STEP,
        re.compile(_BEFORE + r"(?:global|total|train|optim\w*)[\s_](?:step|iter)s?$|^num_updates$"),
    ),
    (
        _Kind.STEP,
        re.compile(_BEFORE + r"(?:steps?|iters?|iterations?|batch|it|updates?|itr|mini-?batch)$"),
    ),
    (_Kind.RANK, re.compile(r"rank$")),
    (
        _Kind.METRIC,
        re.compile(
            r"loss|acc|ppl|perplex|reward|score|err|nll|bpb|bits|grad|lr|learning.?rate|norm|kl"
            r"|entropy|auc|f1|iou|map|bleu|psnr|fid|mse|mae|elbo|objective|cost"
        ),
    ),
)


@lru_cache(maxsize=4096)
def _name_in(gap: str) -> _Name:
    """Return the name in the text between two numbers."""
    stripped = gap.rstrip(" :=[(#\t")
    text = _PART.split(stripped)[-1].strip(" :=.*->#'\"_")
    length = len(gap) - stripped.rfind(text) if text else 0
    return _Name(_kind_of(text.lower()), text, length)


def _kind_of(name: str) -> _Kind:
    if not name:
        return _Kind.NAMELESS
    for kind, pattern in _KINDS:
        if pattern.search(name):
            return kind
    return _Kind.OTHER


def _read(line: str) -> Parsed | None:
    clean = line[:_LONGEST_LINE]
    if ":" in clean or "-" in clean:
        clean = _CLOCK.sub(lambda match: " " * len(match[0]), clean)
    counts: dict[_Kind, float] = {}
    values: dict[str, float] = {}
    start, end, is_metric = len(line), 0, False
    for place in (found.start() for found in _BEGIN.finditer(clean)):
        match = _NUMBER.match(clean, place) if place >= end else None
        if match is None:
            continue
        kind, name, length = _name_in(clean[max(end, place - _LONGEST_NAME) : place])
        begin, end = place - length, match.end()
        if kind is _Kind.NAMELESS:
            if match[3] is None:
                continue
            kind = _Kind.STEP  # ``[12/100]``
        if kind is _Kind.OTHER and start == len(line):
            continue  # a number before the text of the program
        value = scaled(match[1], match[2])
        if kind in (_Kind.METRIC, _Kind.OTHER):
            values.setdefault(name, value)
            is_metric = is_metric or kind is _Kind.METRIC
        else:
            counts.setdefault(kind, value)
        if kind is not _Kind.RANK:
            start = min(start, begin)
    step = counts.get(_Kind.GLOBAL_STEP, counts.get(_Kind.STEP))
    epoch = counts.get(_Kind.EPOCH)
    if not is_metric or (step is None and epoch is None):
        return None
    rank = counts.get(_Kind.RANK, -1.0)
    is_rank = 0 <= rank < _MOST_RANKS and rank == int(rank)
    return Parsed(values, start, step, epoch, rank=int(rank) if is_rank else None)


GENERIC: Final = LineFormat(
    "generic",
    tuple(
        form.encode()
        for word in ("step", "iter", "epoch", "batch", "update", "loss")
        for form in (word, word.capitalize(), word.upper())
    ),
    _read,
)
