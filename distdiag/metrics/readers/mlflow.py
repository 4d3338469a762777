"""MLflow's folder of metrics: one file for each, with a line ``time value step`` for each value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distdiag.metrics.readers.numbers import number_in
from distdiag.metrics.readers.records import Collector, Record
from distdiag.metrics.readers.sources import Block

_FOLDER: Final = "metrics"
_LINE: Final = re.compile(r"(\d{10,16}+) (\S{1,40}+)(?: (-?\d{1,18}+))?(?: \S.*)?")


def metric_name(path: Path) -> str:
    """Return the name of the metric that a file is of, ``""`` if it lies in no such folder."""
    parts = path.parts[:-1]
    if _FOLDER not in parts:
        return ""
    place = len(parts) - parts[::-1].index(_FOLDER)
    return "/".join(path.parts[place:])


def metrics_folder(path: Path) -> Path:
    """Return the folder ``metrics`` that a file lies in."""
    return next(folder for folder in path.parents if folder.name == _FOLDER)


def is_metric(head: str) -> bool:
    """Whether the first line of a file is one of MLflow's."""
    first = head.split("\n", 1)[0].strip()
    return (match := _LINE.fullmatch(first)) is not None and number_in(match[2]) is not None


def read_metric(text: Iterator[Block], name: str, collector: Collector) -> None:
    """Read the file of one metric."""
    for block in text:
        for number, line in enumerate(block.data.split(b"\n"), block.first):
            match = _LINE.fullmatch(line.decode("utf-8", "replace").strip())
            value = number_in(match[2]) if match else None
            if match is not None and value is not None:
                step = float(match[3]) if match[3] else None
                record = Record({name: value}, step, number, time=int(match[1]) / 1e3)
                collector.add("mlflow", record)
