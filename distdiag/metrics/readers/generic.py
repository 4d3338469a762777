"""Lines of a trainer of one's own: any that name a step or an epoch, and a number that is a metric.

Each number has the name that stands before it: ``Epoch [1/10], Step [100/600], Loss: 0.5``.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import NUMBER, UNIT, scaled

_CLOCK: Final = re.compile(r"\d{4}-\d\d-\d\d|(?<![\d.])\d{1,3}+:\d\d(?::\d\d)?+(?:[.,]\d{1,9}+)?")
_NUMBER: Final = re.compile(rf"(?<![\w.@/-])({NUMBER})({UNIT})?+( ?/ ?\d++)?(?!\w)")
# What parts a name from what stands before it.
_PART: Final = re.compile(r"[,;|()\[\]{}<>\t]|\s-\s|:\s|\s{2,}")
_LONGEST_NAME: Final = 60

_STEP: Final = re.compile(
    r"(?:^|.*[\s_/])(?:step|steps|iter|iters|iteration|iterations|batch|it|update|updates"
    r"|num_updates|itr|mini-batch|minibatch)$"
)
_GLOBAL_STEP: Final = re.compile(
    r"(?:^|.*[\s_/])(?:global|total|train|optim\w*)[\s_](?:step|iter)s?$|^num_updates$"
)
_EPOCH: Final = re.compile(r"(?:^|.*[\s_/])(?:epoch|epochs|ep)$")
_METRIC: Final = re.compile(
    r"loss|acc|ppl|perplex|reward|score|err|nll|bpb|bits|grad|lr|learning.?rate|norm|kl|entropy"
    r"|auc|f1|iou|map|bleu|psnr|fid|mse|mae|elbo|objective|cost"
)


class _Named(NamedTuple):
    name: str
    value: float
    has_total: bool
    start: int


def _numbers(line: str) -> list[_Named]:
    """Return the numbers of a line with the names before them."""
    found = []
    end = 0
    for match in _NUMBER.finditer(line):
        gap = line[max(end, match.start() - _LONGEST_NAME) : match.start()]
        stripped = gap.rstrip(" :=[(#\t")
        name = _PART.split(stripped)[-1].strip(" :=.*->#'\"_")
        start = match.start() - len(gap) + stripped.rfind(name) if name else match.start()
        value = scaled(match[1], match[2])
        found.append(_Named(name, value, bool(match[3]), start))
        end = match.end()
    return found


def _read(line: str) -> Parsed | None:
    clean = _CLOCK.sub(lambda match: " " * len(match[0]), line[:4096])
    numbers = _numbers(clean)
    step = epoch = rank = None
    values: list[tuple[str, float]] = []
    start = len(line)
    is_global = is_metric = False
    for name, value, has_total, at in numbers:
        low = name.lower()
        if _EPOCH.match(low) and epoch is None:
            epoch = value
        elif _STEP.match(low) and not is_global:
            is_this = _GLOBAL_STEP.match(low) is not None
            step = value if step is None or is_this else step
            is_global = is_this
        elif not name:
            if not has_total or step is not None:
                continue
            step = value
        elif low.endswith("rank"):
            rank = int(value) if value >= 0 and value == int(value) else None
            continue
        else:
            is_metric = is_metric or _METRIC.search(low) is not None
            if not (_METRIC.search(low) or start < at):
                continue  # a number before the text of the program
            values.append((name, value))
        start = min(start, at)
    if not is_metric or (step is None and epoch is None):
        return None
    return Parsed(named(values), start, step, epoch, rank=rank)


GENERIC: Final = LineFormat(
    "generic",
    tuple(
        form.encode()
        for word in ("step", "iter", "epoch", "batch", "update", "loss")
        for form in (word, word.capitalize(), word.upper())
    ),
    _read,
)
