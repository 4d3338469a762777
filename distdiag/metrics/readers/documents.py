"""Whole documents of JSON: `trainer_state.json`, lists of records, and lists of values by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from distdiag.metrics.readers.mappings import as_number, decoded, parsed_mapping
from distdiag.metrics.readers.records import Collector, Record

LARGEST: Final = 256 << 20
"""A document is read as a whole; larger ones are not."""


def read_document(data: bytes, collector: Collector) -> bool:
    """Read a document, and say whether it is whole."""
    found = decoded(data.decode("utf-8", "replace"))
    if found is None:
        return False
    if isinstance(found, dict):
        _read_mapping(found, collector)
    elif isinstance(found, list):
        _read_records("json", found, collector)
    return True


def _read_mapping(found: Mapping[str, object], collector: Collector) -> None:
    history = found.get("log_history")
    if isinstance(history, list):  # transformers
        _read_records("trainer-state", history, collector)
        return
    for value in (found.get("history"), found.get("metrics"), found.get("logs"), found):
        if isinstance(value, list):
            _read_records("json", value, collector)
        elif isinstance(value, dict):
            _read_columns(value, collector)
        if collector:
            return
    parsed = parsed_mapping(found)
    if parsed is not None and parsed.step is not None:  # the only line of a log of records
        _read_records("jsonl", [found], collector)


def _read_records(name: str, records: Sequence[object], collector: Collector) -> None:
    """Read a list of mappings, or what is a list of values as one series."""
    for record in records:
        parsed = parsed_mapping(record) if isinstance(record, dict) else None
        if parsed is not None:
            step, epoch = parsed.step, parsed.epoch
            collector.add(
                name,
                Record(parsed.values, step, 0, epoch, time=parsed.time, is_weak=parsed.is_weak),
            )
    if not collector and len(records) > 1:
        _add_values("values", records, None, collector)


def _read_columns(columns: Mapping[str, object], collector: Collector) -> None:
    """Read ``{"step": [1, 2], "loss": [3.0, 2.5]}``, and ``{"loss": [[1, 3.0], [2, 2.5]]}``."""
    steps = next(
        (columns[name] for name in ("step", "steps", "iteration") if name in columns), None
    )
    for name, values in columns.items():
        if values is not steps and isinstance(values, list) and len(values) > 1:
            _add_values(name, values, steps if isinstance(steps, list) else None, collector)


def _add_values(
    name: str, values: Sequence[object], steps: Sequence[object] | None, collector: Collector
) -> None:
    for place, value in enumerate(values):
        step = as_number(steps[place]) if steps and len(steps) == len(values) else None
        if isinstance(value, list) and 2 <= len(value) <= 3:  # TensorBoard's own: time, step, value
            step, value = as_number(value[-2]), value[-1]
        number = as_number(value)
        if number is not None:
            collector.add("json", Record({name: number}, step))
