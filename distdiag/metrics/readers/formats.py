"""Which reader a file is for, by its name and its first bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from distdiag.metrics.readers.console import Console
from distdiag.metrics.readers.documents import LARGEST, read_document
from distdiag.metrics.readers.found import Found
from distdiag.metrics.readers.json_lines import JSON_LINES, decoded
from distdiag.metrics.readers.megatron import MEGATRON, NEMO
from distdiag.metrics.readers.records import Collector
from distdiag.metrics.readers.sources import Block, UnreadableError, blocks, opened
from distdiag.metrics.readers.tables import read_table, separator_of

# In this order: where two formats could read a line, the first does.
LINE_FORMATS: Final = (MEGATRON, NEMO, JSON_LINES)


def curves_of(path: Path) -> Found:
    """Read one file, whatever it holds; what is wrong with it is told in the remarks."""
    found = Found(path)
    try:
        with opened(path) as read:
            _read_text(blocks(read), found)
    except UnreadableError as error:
        found.say(str(error))
    return found


def _read_text(text: Iterator[Block], found: Found) -> None:
    first = next(text, None)
    if first is None:
        found.say("is empty")
        return
    whole = chain([first], text)
    head = first.data[: 1 << 16].decode("utf-8", "replace")
    if _is_document(first.data):
        collector = _read_document(whole, found)
    elif separator := separator_of(head):
        collector = read_table(whole, separator, found)
    else:
        collector = _read_lines(whole, found)
    remarks: list[str] = []
    found.curves.extend(collector.curves(remarks))
    for remark in remarks:
        found.say(remark)


def _is_document(data: bytes) -> bool:
    """Whether a text is one document of JSON: its first line is no record of its own."""
    start = data.lstrip()[:1]
    if start not in (b"{", b"["):
        return False
    first, _, rest = data.lstrip().partition(b"\n")
    if start == b"[" and rest.strip():
        return first.strip() in (b"[", b"[{") or first.rstrip().endswith(b",")
    is_record = first.rstrip().endswith(b"}") and isinstance(decoded(first), dict)
    return not is_record or not rest.strip()


def _read_document(text: Iterator[Block], found: Found) -> Collector:
    collector = Collector(found.source)
    data = bytearray()
    for block in text:
        data += block.data
        if len(data) > LARGEST:
            found.say(f"is a document of JSON of more than {LARGEST >> 20} MiB, which is not read")
            return collector
    if not read_document(bytes(data), collector):
        found.say("begins like a document of JSON and is damaged or cut")
    return collector


def _read_lines(text: Iterator[Block], found: Found) -> Collector:
    collector = Collector(found.source)
    console = Console(LINE_FORMATS, collector)
    for block in text:
        console.feed(block)
    return collector
