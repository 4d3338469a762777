"""Bars of progress: Keras, and tqdm with what lightning, diffusers and others hang on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import fields, number_in, pairs

# ``100/100 [=====] - 1s 5ms/step - loss: 0.5 - val_loss: 0.6``; Keras 3 has a bar of ``━``
_KERAS: Final = re.compile(
    r"(?:^|[\s\]:])(\d{1,12}+)/(\d{1,12}+) (?:\[=++\]|\[=*+>?\.*+\]|━++)[^-]{0,80}+- "
)
_KERAS_SPEED: Final = re.compile(r"\b(\d{1,9}+(?:ms|s|us))/(?:step|epoch)\b")


def _read_keras(line: str) -> Parsed | None:
    match = _KERAS.search(line)
    if match is None or match[1] != match[2]:
        return None  # the means of a part of an epoch
    values = named(fields(line[match.end() :], " - "))
    if values and (speed := _KERAS_SPEED.search(line)):
        values["step_time_s"] = number_in(speed[1]) or 0.0
    return Parsed(values, match.start(1)) if values else None


KERAS: Final = LineFormat("keras", (b" - loss: ", "━ ".encode(), b"=] - "), _read_keras)

# ``Epoch 0:  50%|###  | 50/100 [00:01<00:01, 49.90it/s, v_num=0, train_loss=0.5]``
_COUNT: Final = re.compile(r" {0,12}+(\d{1,12}+)/(\d{1,12}+|\?) \[([^\]\n]{0,2000}+)")
_EPOCH: Final = re.compile(r"\b[Ee]poch:? \[?(\d{1,9}+)(/\d{1,9}+)?")
_NO_CURVES: Final = frozenset({"v_num", "epoch", "Epoch", "step", "Step", "it"})


def _read_bar(line: str) -> Parsed | None:
    share = line.find("%|")
    bar_end = line.find("|", share + 2)
    match = _COUNT.match(line, bar_end + 1) if 0 <= share < bar_end else None
    if match is None:
        return None
    head = line[max(0, share - 200) : share]
    values = named(_hung_on(head, match[3]))
    if not values:
        return None
    step, epoch = float(match[1]), _EPOCH.search(head)
    start = max(0, share - 200) + (epoch.start() if epoch else len(head))
    if epoch is None or match[2] == "?":
        return Parsed(values, start, step=step, is_repeated=True)
    # ``Epoch 1/10`` counts from 1, ``Epoch 0`` from 0.
    number = float(epoch[1]) - bool(epoch[2])
    return Parsed(values, start, step, number, float(match[2]), is_repeated=True)


def _hung_on(head: str, tail: str) -> Iterator[tuple[str, float]]:
    """Yield what stands before a bar, and behind its speed."""
    for name, value in pairs(head):
        if name not in _NO_CURVES:
            yield name, value
    for part in tail.split(",")[1:]:
        for sign in ("=", ":"):
            name, found, text = part.partition(sign)
            number = number_in(text) if found else None
            if number is not None and name.strip() not in _NO_CURVES:
                yield name.strip(), number
                break


BARS: Final = LineFormat("bars", (b"%|",), _read_bar)
