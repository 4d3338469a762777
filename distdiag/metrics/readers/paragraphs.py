"""OLMo and MosaicML's composer: a line names the step, and below it each value has its line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed
from distdiag.metrics.readers.numbers import number_in

# ``[step=10/1000,epoch=0]`` and below it ``    train/CrossEntropyLoss=3.2``
_OLMO: Final = re.compile(
    r"\[(?:step|eval_step)=(\d{1,12}+)(?:/\d{1,12}+)?+(?:,epoch=(\d{1,9}+))?+[^\]]{0,100}+\]\s*+$"
)
_OLMO_VALUE: Final = re.compile(r"(?:^|\s)([A-Za-z][\w/.@%()\[\] -]{0,160}+)=(\S{1,40}+)\s*+$")


def _follow_olmo(line: str) -> Mapping[str, float] | None:
    match = _OLMO_VALUE.search(line)
    if match is None or "[step=" in line:
        return None
    number = number_in(match[2])
    return {} if number is None else {match[1]: number}


def _read_olmo(line: str) -> Parsed | None:
    match = _OLMO.search(line)
    if match is None:
        return None
    return Parsed({}, match.start(), step=float(match[1]), follow=_follow_olmo)


OLMO: Final = LineFormat("olmo", (b"[step=", b"[eval_step="), _read_olmo)

# ``[batch=10/1000]:`` or ``[epoch=1][batch=10/100]:``, below it
# ``\t Train loss/train/total: 11.2``;
# ``[Eval batch=5/10] Eval on c4 data:``, below it ``\t Eval metrics/c4/Loss: 3.1``
_COMPOSER: Final = re.compile(
    r"\[(epoch|batch|token|sample|iteration)=(\d{1,15}+)(?:/(\d{1,15}+))?+\]"
    r"(?:\[batch=(\d{1,12}+)(?:/(\d{1,12}+))?+\])?+:\s*+$"
)
_COMPOSER_EVALUATION: Final = re.compile(r"\[Eval batch=\d{1,12}+/\d{1,12}+\] Eval on [^:]{1,200}:")
_COMPOSER_VALUE: Final = re.compile(r"(?:^|\s)(?:Train|Eval) ([^:\n]{1,200}): (\S{1,40}+)\s*+$")


def _follow_composer(line: str) -> Mapping[str, float] | None:
    match = _COMPOSER_VALUE.search(line)
    if match is None:
        return None
    number = number_in(match[2])
    return {} if number is None else {match[1]: number}


def _read_composer(line: str) -> Parsed | None:
    if match := _COMPOSER_EVALUATION.search(line):
        return Parsed({}, match.start(), follow=_follow_composer)
    match = _COMPOSER.search(line)
    if match is None:
        return None
    step, start = float(match[2]), match.start()
    if match[4] is None:
        return Parsed({}, start, step=step, follow=_follow_composer)
    # Epochs are counted from 1, batches within them.
    per_epoch = float(match[5]) if match[5] else None
    return Parsed({}, start, float(match[4]), step - 1, per_epoch, follow=_follow_composer)


COMPOSER: Final = LineFormat(
    "composer",
    (b"[epoch=", b"[batch=", b"[token=", b"[sample=", b"[iteration=", b"[Eval batch="),
    _read_composer,
)
