"""Event files of TensorBoard: records with a length and a checksum, each one message."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, Final

from distdiag.metrics.readers.found import Found
from distdiag.metrics.readers.messages import as_text, decode_errors, message_class
from distdiag.metrics.readers.records import Collector, Record
from distdiag.metrics.readers.sources import Read

_HEADER: Final = struct.Struct("<QI")
_LARGEST: Final = 64 << 20
"""Of one record in bytes. Images and histograms are far smaller."""
_NUMPY: Final = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}
"""By TensorFlow's number of a type: how one value of it is packed."""
_BFLOAT16: Final = 14
_START: Final = 1
"""A session that starts: the same file goes on after a restart."""


def is_event_file(head: bytes) -> bool:
    """Whether a file begins with a record whose length has the right checksum."""
    if len(head) < _HEADER.size:
        return False
    length, checksum = _HEADER.unpack_from(head)
    return bool(length <= _LARGEST and masked_crc(head[:8]) == checksum)


def read_events(read: Read, collector: Collector, found: Found) -> None:
    """Read all scalars of an event file, to its end or to where it is cut.

    Raises:
        NoProtobufError: the library that reads messages is not installed.

    """
    event_class, damaged = message_class("Event"), 0
    for data in _records(read, found):
        event = event_class()
        try:
            event.ParseFromString(data)
        except decode_errors():
            damaged += 1
            continue
        if event.session_log.status == _START:
            collector.begin()
        values = dict(_scalars(event))
        if values:
            record = Record(values, float(event.step), time=float(event.wall_time))
            collector.add("tensorboard", record)
    if damaged:
        found.say(f"{damaged} of its records are damaged and were passed over")


def _scalars(event: Any) -> Iterator[tuple[str, float]]:  # noqa: ANN401 - made while it runs
    for value in event.summary.value:
        if value.HasField("simple_value"):
            yield as_text(value.tag), float(value.simple_value)
        elif value.HasField("tensor"):
            number = _number(value.tensor)
            if number is not None:
                yield as_text(value.tag), number


def _number(tensor: Any) -> float | None:  # noqa: ANN401 - made while it runs
    """Return the value of a tensor of one number, None for all others."""
    if math.prod(dim.size for dim in tensor.tensor_shape.dim) != 1:
        return None
    for values in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
        if len(values):
            return float(values[0])
    content, form = tensor.tensor_content, _NUMPY.get(tensor.dtype, "")
    if form and len(content) == struct.calcsize(form):
        return float(struct.unpack(form, content)[0])
    if tensor.dtype == _BFLOAT16 and len(content) == 2:
        return float(struct.unpack("<f", b"\0\0" + content)[0])
    return None


def _records(read: Read, found: Found) -> Iterator[bytes]:
    while header := _exactly(read, _HEADER.size):
        if len(header) < _HEADER.size:
            found.say("is cut within a record: a writer still holds it, or was killed")
            return
        length, checksum = _HEADER.unpack(header)
        if length > _LARGEST or masked_crc(header[:8]) != checksum:
            found.say("is damaged: a record has a length that its checksum denies")
            return
        data = _exactly(read, length)
        end = _exactly(read, 4)
        if len(data) < length or len(end) < 4:
            found.say("is cut within a record: a writer still holds it, or was killed")
            return
        yield data


def _exactly(read: Read, size: int) -> bytes:
    parts = []
    while size > 0 and (part := read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# CRC-32C of Castagnoli, bit-reversed; the mask is the one of the format of records.
def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC: Final = _table()


def masked_crc(data: bytes) -> int:
    """Return the checksum of a part of a record."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
