"""Which reader a file is for, by its name and its first bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from distdiag.dumps.files import is_archive
from distdiag.dumps.log_text import as_utf8
from distdiag.metrics.readers.bars import BARS, KERAS
from distdiag.metrics.readers.console import Console
from distdiag.metrics.readers.documents import LARGEST, read_document
from distdiag.metrics.readers.event_files import is_event_file, read_events
from distdiag.metrics.readers.found import Found
from distdiag.metrics.readers.generic import GENERIC
from distdiag.metrics.readers.language import (
    DEEPSPEED,
    MEGATRON,
    NANOGPT,
    NEMO,
    TORCHTITAN,
    TORCHTUNE,
    VERL,
)
from distdiag.metrics.readers.lines import LineFormat
from distdiag.metrics.readers.mappings import DICTS, JSON_LINES, decoded
from distdiag.metrics.readers.messages import NoProtobufError
from distdiag.metrics.readers.mlflow import is_metric, metric_name, read_metric
from distdiag.metrics.readers.paragraphs import COMPOSER, OLMO
from distdiag.metrics.readers.records import Collector
from distdiag.metrics.readers.sources import CHUNK, Block, Read, UnreadableError, blocks, opened
from distdiag.metrics.readers.tables import read_table, separator_of
from distdiag.metrics.readers.vision import DETECTRON, IMAGENET, MMENGINE
from distdiag.metrics.readers.wandb_files import MAGIC, read_run

# A mapping, a list of mappings or lists, a list of numbers; no time or rank in brackets.
_DOCUMENT: Final = re.compile(rb"\s*+(?:\{\s*+(?:\"|$)|\[\s*+(?:[\[{]|[-\d.eE+]{1,32}+\s*+,|$))")

# In this order: where two formats could read a line, the first does.
LINE_FORMATS: Final = (
    *(NEMO, MEGATRON, DEEPSPEED, TORCHTITAN, TORCHTUNE, VERL, NANOGPT),
    *(OLMO, COMPOSER, IMAGENET, MMENGINE, DETECTRON, DICTS, JSON_LINES, KERAS, BARS),
)


def curves_of(path: Path) -> Found:
    """Read one file, whatever it holds; what is wrong with it is told in the remarks."""
    found = Found(path)
    try:
        _read_text(path, found)
    except UnreadableError as error:
        found.say(str(error))
    return found


def _read_text(path: Path, found: Found) -> None:
    collector = Collector(path)
    try:
        with opened(path) as read:
            others = _read_once(read, collector, found)
        if others and not collector:
            # Only now: a line that a known format has another name for is not read twice.
            with opened(path) as read:
                _read_lines(blocks(read), others, collector, found)
    except NoProtobufError:
        found.say("needs a library to be read: pip install 'distdiag[metrics]'")
    finally:
        remarks: list[str] = []
        found.curves.extend(collector.curves(remarks))
        for remark in remarks:
            found.say(remark)


def _read_once(read: Read, collector: Collector, found: Found) -> Sequence[LineFormat]:
    """Read a file as what it is; return the formats of lines to look for if it held nothing."""
    start = read(CHUNK)
    read = _after(start, read)
    if is_event_file(start):
        read_events(read, collector, found)
    elif start.startswith(MAGIC):
        read_run(read, collector, found)
    elif is_archive(start[:512]):
        found.say("is an archive: unpack it first")
    elif _is_document(as_utf8(start)):
        return () if _read_document(read, collector, found) else LINE_FORMATS
    else:
        return _read_blocks(blocks(read), collector, found)
    return ()


def _after(start: bytes, read: Read) -> Read:
    """Return what reads a file from its beginning, of which a part is read already."""
    left = [start]

    def read_again(size: int) -> bytes:
        if not left[0]:
            return read(size)
        data, left[0] = left[0][:size], left[0][size:]
        return data

    return read_again


def _read_blocks(text: Iterator[Block], collector: Collector, found: Found) -> Sequence[LineFormat]:
    first = next(text, None)
    if first is None:
        found.say("is empty")
        return ()
    whole = chain([first], text)
    head = first.data[: 1 << 16].decode("utf-8", "replace")
    if (name := metric_name(found.source)) and is_metric(head):
        read_metric(whole, name, collector)
    elif separator := separator_of(head):
        read_table(whole, separator, collector, found)
    else:
        _read_lines(whole, LINE_FORMATS, collector, found)
        return (GENERIC,)
    return ()


def _is_document(data: bytes) -> bool:
    """Whether a text is one document of JSON: its first line is no record of its own."""
    if _DOCUMENT.match(data) is None:
        return False
    first, _, rest = data.lstrip().partition(b"\n")
    if first.startswith(b"[") and first.strip(b"[ \t\r")[:1] in b"{":
        return True
    if first.startswith(b"["):  # `[1,3]<stdout>: ` begins like a list of numbers
        return isinstance(decoded(first), list) or not first.strip(b"[ \t\r")
    is_record = first.rstrip().endswith(b"}") and isinstance(decoded(first), dict)
    return not is_record or not rest.strip()


def _read_document(read: Read, collector: Collector, found: Found) -> bool:
    """Read a document of JSON, and say whether it is one."""
    data = bytearray()
    while part := read(CHUNK):
        data += part
        if len(data) > LARGEST:
            found.say(f"is a document of JSON of more than {LARGEST >> 20} MiB, which is not read")
            return True
    if read_document(as_utf8(bytes(data)), collector):
        return True
    found.say("begins like a document of JSON, and is damaged or cut")
    return False


def _read_lines(
    text: Iterator[Block], formats: Sequence[LineFormat], collector: Collector, found: Found
) -> None:
    console = Console(formats, collector, found.say)
    try:
        for block in text:
            console.feed(block)
    except UnreadableError as error:  # what came before it may need another reader
        found.say(str(error))
