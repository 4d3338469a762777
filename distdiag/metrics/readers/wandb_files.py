"""Runs of W&B on disk: ``run-….wandb``, a log of LevelDB's form whose records are messages.

The file has a header of 7 bytes and blocks of 32 KiB. Each part of a record begins with a checksum
(4 bytes), its length (2) and its kind (1): whole, first, middle, last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from distdiag.metrics.readers.found import Found
from distdiag.metrics.readers.mappings import decoded, parsed_mapping
from distdiag.metrics.readers.messages import as_text, decode_errors, message_class
from distdiag.metrics.readers.records import Collector, Record
from distdiag.metrics.readers.sources import Read

MAGIC: Final = b":W&B"
_BLOCK: Final = 32 << 10
_FILE_HEADER: Final = 7
_PART: Final = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST: Final = 64 << 20
"""Of one record in bytes."""


def read_run(read: Read, collector: Collector, found: Found) -> None:
    """Read the history of a run, to its end or to where it is cut.

    Raises:
        NoProtobufError: the library that reads messages is not installed.

    """
    record_class, damaged = message_class("Record"), 0
    for data in _records(read, found):
        record = record_class()
        try:
            record.ParseFromString(data)
        except decode_errors():
            damaged += 1
            continue
        if not record.HasField("history"):
            continue
        items = {_name(item): _value(item) for item in record.history.item}
        if record.history.HasField("step"):
            items.setdefault("_step", record.history.step.num)
        parsed = parsed_mapping(items)
        if parsed is not None:
            told = Record(
                parsed.values,
                parsed.step,
                epoch=parsed.epoch,
                time=parsed.time,
                is_weak=parsed.is_weak,
            )
            collector.add("wandb", told)
    if damaged:
        found.say(f"{damaged} of its records are damaged and were passed over")


def _name(item: Any) -> str:  # noqa: ANN401 - the class is made while it runs
    return ".".join(map(as_text, item.nested_key)) or as_text(item.key)


def _value(item: Any) -> object:  # noqa: ANN401 - the class is made while it runs
    for name in ("value_json", "json"):
        if item.HasField(name):
            return decoded(getattr(item, name))
    for name in ("number", "integer", "text"):
        if item.HasField(name):
            value: object = getattr(item, name)
            return value
    return None


def _records(read: Read, found: Found) -> Iterator[bytes]:
    begun = bytearray()
    for kind, data in _parts(read, found):
        if kind == _WHOLE:
            yield data
        elif kind == _FIRST:
            begun = bytearray(data)
        elif len(begun) <= _LARGEST:
            begun += data
            if kind == _LAST:
                yield bytes(begun)
                begun = bytearray()


def _parts(read: Read, found: Found) -> Iterator[tuple[int, bytes]]:
    block, place = _block(read), _FILE_HEADER
    while block:
        while place + _PART.size <= len(block):
            _, length, kind = _PART.unpack_from(block, place)
            if not length and not kind:
                break  # zeros to the end of the block
            place += _PART.size
            if place + length > len(block) or not _WHOLE <= kind <= _LAST:
                found.say("is cut or damaged within a record: the run still writes, or was killed")
                break
            yield kind, block[place : place + length]
            place += length
        block, place = _block(read), 0


def _block(read: Read) -> bytes:
    parts, size = [], _BLOCK
    while size > 0 and (part := read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
