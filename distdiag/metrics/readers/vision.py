"""Trainers of image models: PyTorch's ImageNet example, timm, mmengine and mmcv, detectron2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from distdiag.metrics.readers.lines import LineFormat, Parsed, named
from distdiag.metrics.readers.numbers import NUMBER, UNIT, pairs, scaled

# ``Epoch: [0][  10/5005]\tTime  0.512 ( 1.204)\tLoss 6.9e+00 (6.95e+00)\tAcc@1   0.00 (  0.10)``
_IMAGENET: Final = re.compile(r"\bEpoch: \[(\d{1,9}+)\]\[ {0,9}+(\d{1,12}+)/ {0,9}+(\d{1,12}+)\]")
_IMAGENET_TEST: Final = re.compile(r"\bTest: {0,4}+\[ {0,9}+\d{1,12}+/ {0,9}+\d{1,12}+\]")
_IMAGENET_SUMMARY: Final = re.compile(r"^[^*]{0,100}\* (?=Acc@1 )")
# ``Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.96)  Time: 0.312s, 820.10/s (...)  LR: 1.000e-05``
_TIMM: Final = re.compile(
    r"\bTrain: (\d{1,9}+) \[ {0,9}+(\d{1,12}+)/ {0,9}+(\d{1,12}+) \( {0,4}+\d{1,3}+%\)\]"
)
# a name, its value, and in brackets its mean so far
_MEANS: Final = re.compile(
    rf"([A-Za-z][\w@/.]{{0,40}}+):? {{0,9}}+({NUMBER})({UNIT})?+"
    rf"(?: {{1,4}}+\( {{0,9}}+({NUMBER})\))?"
)


def _means(text: str, prefix: str = "") -> Iterator[tuple[str, float]]:
    for match in _MEANS.finditer(text):
        yield f"{prefix}{match[1]}", scaled(match[2], match[3])
        if match[4]:
            yield f"{prefix}{match[1]} (avg)", scaled(match[4], match[3])


def _read_imagenet(line: str) -> Parsed | None:
    if match := _IMAGENET.search(line) or _TIMM.search(line):
        epoch, batch, per_epoch = (float(number) for number in match.groups())
        values = named(_means(line[match.end() :]))
        return Parsed(values, match.start(), batch, epoch, per_epoch)
    if match := _IMAGENET_TEST.search(line):
        # It counts batches of the evaluation: the step is that of the training before.
        return Parsed(named(_means(line[match.end() :], "Test ")), match.start())
    if match := _IMAGENET_SUMMARY.match(line):
        return Parsed(named(_means(line[match.end() :], "Test mean ")), match.end())
    return None


IMAGENET: Final = LineFormat(
    "imagenet", (b"Epoch: [", b"Test: [", b"Train: ", b"* Acc@1 "), _read_imagenet
)

# ``Epoch(train) [1][ 50/100]  lr: 1e-3  eta: 0:01:00  time: 0.5  loss: 2.3``, with commas before
# mmengine; ``Iter(train) [ 50/1000]``; ``Epoch(val) [1][10/10]    accuracy/top1: 45.0``
_MM: Final = re.compile(
    r"\b(Epoch|Iter)(?:\((train|val|test)\))? {0,4}+\[ {0,9}+(\d{1,12}+)(?:/ {0,9}+(\d{1,12}+))?+\]"
    r"(?:\[ {0,9}+(\d{1,12}+)/ {0,9}+(\d{1,12}+)\])?"
)


def _read_mm(line: str) -> Parsed | None:
    match = _MM.search(line)
    if match is None or not (match[5] or match[4]):
        return None
    values = named(pairs(line[match.end() :]))
    values.pop("eta", None)
    if not values:
        return None
    if match[2] in ("val", "test"):
        values = {f"{match[2]} {name}": value for name, value in values.items()}
        return Parsed(values, match.start())
    if match[1] == "Iter":
        return Parsed(values, match.start(), step=float(match[3]))
    if not match[5]:
        return None
    # Epochs are counted from 1.
    epoch = float(match[3]) - 1
    return Parsed(values, match.start(), float(match[5]), epoch, float(match[6]))


MMENGINE: Final = LineFormat("mmengine", (b"Epoch(", b"Epoch [", b"Iter(", b"Iter ["), _read_mm)

# ``d2.utils.events]:  eta: 0:01:00  iter: 19  total_loss: 1.2  time: 0.2  max_mem: 2000M``
_DETECTRON: Final = re.compile(r"(?:\beta: [\w :,]{1,40}? )?\biter: (\d{1,12}+) {2}")
_MAX_MEMORY: Final = re.compile(r"\bmax_mem: (\d{1,9}+)M\b")


def _read_detectron(line: str) -> Parsed | None:
    match = _DETECTRON.search(line)
    if match is None:
        return None
    values = named(pairs(line[match.end() :]))
    if memory := _MAX_MEMORY.search(line, match.end()):
        values["max_mem"] = float(memory[1]) / 1024  # it prints MiB
    return Parsed(values, match.start(), step=float(match[1]))


DETECTRON: Final = LineFormat("detectron2", (b"iter: ",), _read_detectron)
