"""The text of a log, whatever it is wrapped in: UTF-16, JSON, lines broken by a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from distdiag.dumps.log_prefixes import NOBODY, speaker_in
from distdiag.dumps.reading import Dump
from distdiag.events.errors import UNDECODABLE

_PROBED_BYTES: Final = 4096
_PROBED_LINES: Final = 50
_LONGEST_LINE: Final = 1 << 20
_LINE: Final = re.compile(rb"[^\r\n]+")

_MARKS: Final = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    b"\xef\xbb\xbf": "utf-8-sig",
}
LEAST_ASCII: Final = 0.5
"""Bytes of something else, read as two bytes a character, are letters of all scripts."""


def plain(dump: Dump) -> Dump:
    """Return the dump with its text as UTF-8, one line of the program in each line.

    Files that are no text, and text that is plain already, are returned as they are.
    """
    data = unwrapped(as_utf8(dump.data))
    return dump if data is dump.data else Dump(path=dump.path, data=data, is_cut=dump.is_cut)


# Encodings: some shells write UTF-16, with a mark at the beginning or without one.


def as_utf8(data: bytes) -> bytes:
    """Return a text of whatever encoding as UTF-8."""
    encoding = encoding_of(data[:_PROBED_BYTES])
    return _recoded(data, encoding) if encoding else data


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text that begins with these bytes, ``""`` for plain UTF-8."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    return _unmarked(head)


def _recoded(data: bytes, encoding: str) -> bytes:
    return data.decode(encoding, errors="replace").encode("utf-8", errors="replace")


def _unmarked(head: bytes) -> str:
    """Return the encoding of text of two bytes a character, or nothing."""
    if 0 not in head[:64] or len(head) < 16:
        return ""
    for encoding in ("utf-16-le", "utf-16-be"):
        try:
            text = head[: len(head) // 2 * 2].decode(encoding)
        except UnicodeDecodeError:
            continue  # bytes of something else, or half a character at the end
        num_ascii = sum(character.isascii() for character in text)
        is_text = all(each.isprintable() or each in "\t\r\n\x1b" for each in text)
        if is_text and num_ascii >= LEAST_ASCII * len(text):
            return encoding
    return ""


# Lines of JSON: those of containers, of collectors of logs and of loggers.

_TEXTS: Final = ("log", "message", "msg", "text", "MESSAGE", "line")
_TIMES: Final = ("time", "timestamp", "@timestamp", "ts", "asctime")
# Who wrote the line; the values stand in this order before the text.
_NAMES: Final = (
    *("rank", "global_rank", "local_rank", "pod", "pod_name", "container", "container_name"),
    *("host", "hostname", "node", "actor", "worker", "process", "pid"),
)
_RANK_NAMES: Final = {"rank": "rank", "global_rank": "rank", "local_rank": "local_rank"}

_decode: Final[Callable[[bytes], Any]] = msgspec.json.Decoder().decode


def unwrapped(data: bytes) -> bytes:
    """Return the lines of text that lines of JSON hold, or the same bytes if they hold none."""
    if _holds_json(data):
        return b"".join(_json_lines(data))
    return data


def _holds_json(data: bytes) -> bool:
    """Say whether most of the first lines are JSON with a text."""
    if data[:1] not in b'{ \n+0123456789["(' or b'{"' not in data[:_PROBED_BYTES]:
        return False
    lines = [match[0] for match in islice(_LINE.finditer(data), _PROBED_LINES)]
    found = sum(_record(line) is not None for line in lines)
    return found > 0 and 2 * found >= len(lines)


def _record(line: bytes) -> tuple[Mapping[str, Any], str] | None:
    """Return what a line of JSON holds, and its text."""
    line = line.strip()
    if not (line.startswith(b"{") and line.endswith(b"}")) or len(line) > _LONGEST_LINE:
        return None
    try:
        found = _decode(line)
    except UNDECODABLE:
        return None
    if not isinstance(found, dict):
        return None
    text = next((found[name] for name in _TEXTS if isinstance(found.get(name), str)), None)
    return None if text is None else (found, text)


def _json_lines(data: bytes) -> Iterator[bytes]:
    begun: dict[str, str] = {}  # by stream: a line that docker cut at 16 KiB
    for match in _LINE.finditer(data):
        record = _record(match[0])
        if record is None:
            yield match[0] + b"\n"
            continue
        found, text = record
        if isinstance(found.get("log"), str):
            stream = str(found.get("stream"))
            text = begun.pop(stream, "") + text
            if not text.endswith("\n") and len(text) >= 1 << 14:
                begun[stream] = text
                continue
        prefix = _prefix(found)
        for line in (text + _exception(found, text)).splitlines():
            yield f"{prefix}{line}\n".encode(errors="replace")
    for text in begun.values():
        yield text.encode(errors="replace") + b"\n"


def _exception(found: Mapping[str, Any], text: str) -> str:
    """Return the traceback that a logger keeps apart from its message."""
    for name in ("exc_info", "exception", "stack_trace", "exc_text", "stacktrace"):
        more = found.get(name)
        if isinstance(more, str) and "Traceback (most recent call last)" in more:
            return "" if more in text else f"\n{more}"
    return ""


def _prefix(found: Mapping[str, Any]) -> str:
    """Return when, and by whom, a line was written, as far as the record says."""
    inner = found.get("record")
    if isinstance(inner, dict):  # loguru
        extra = inner.get("extra")
        found = {**inner, **(extra if isinstance(extra, dict) else {})}
    pod = found.get("kubernetes")
    if isinstance(pod, dict):
        found = {**found, "pod": pod.get("pod_name") or pod.get("pod", "")}
    parts = [text for name in _TIMES if (text := _time(found.get(name)))][:1]
    for name in _NAMES:
        value = found.get(name)
        if isinstance(value, dict):
            value = value.get("id") or value.get("name")
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            word = "pid" if name == "process" else _RANK_NAMES.get(name, name)
            parts.append(f"{word}={value}")
    return f"({' '.join(parts)}) " if parts else ""


def _time(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("repr")  # loguru
    return value.replace(" ", "T", 1) if isinstance(value, str) and value[:2] == "20" else ""


# Files of ranks, one after the other: what tail prints of several, and launchers of those that
# they kept.

_SECTION: Final = re.compile(
    rb"^(?:==> (?P<file>[^\r\n]{1,300}) <==|-{4,40}Begin global rank (?P<rank>\d{1,6}) "
    rb"STD(?:OUT|ERR)-{4,40}|(?P<end>-{4,40}End global rank \d{1,6} STD(?:OUT|ERR)-{4,40}))[ \r]*$",
    re.MULTILINE,
)
_ENDING: Final = re.compile(r"(?:\.[A-Za-z]{1,4}){1,2}$")
_FILE_OF_LOCAL_RANK: Final = re.compile(rb"attempt_\d{1,6}/(\d{1,6})/std(?:err|out)\.log$")
_TEXT: Final = re.compile(rb"^(?=[^\r\n])(?![^\r\n]{0,128}\[rank\d)", re.MULTILINE)


def signed(data: bytes) -> bytes:
    """Return the text with the rank before each line of a part of which a heading names it."""
    found = list(_SECTION.finditer(data))
    if not any(_signature(match) for match in found):
        return data
    parts, edge = [], 0
    for match, following in zip(found, [*found[1:], None], strict=True):
        end = following.start() if following is not None else len(data)
        parts.append(data[edge : match.end()])
        parts.append(_TEXT.sub(_signature(match), data[match.end() : end]))
        edge = end
    return b"".join(parts)


def _signature(section: re.Match[bytes]) -> bytes:
    """Return what stands before the lines of a rank, or nothing where it is not known."""
    if section["rank"]:
        return b"[rank%d]: " % int(section["rank"])
    name = section["file"] or b""
    path = _ENDING.sub("", name.decode(errors="replace"))
    named = speaker_in(path) if "rank" in path.lower() else NOBODY
    if named.rank is not None:
        return b"[rank%d]: " % named.rank
    kept = _FILE_OF_LOCAL_RANK.search(name)
    local_rank = named.local_rank if kept is None else int(kept[1])
    return b"[default%d]:" % local_rank if local_rank is not None else b""


# Lines that a terminal or a collector broke at a width.

_FRAME: Final = rb'  File "[^"\r\n]{1,1000}", line \d{1,9}(?:, in [^\r\n]*|[ \t]*$)'
_WHOLE: Final = re.compile(_FRAME)
_BROKEN: Final = re.compile(
    rb'(  File "(?![^"\r\n]{1,1000}", line \d)[^\r\n]{1,1000})\r?\n(?=([^\r\n]{1,1000}))'
)


def joined(data: bytes) -> bytes:
    """Return the text with each frame of a traceback on one line."""
    if b'  File "' not in data or _BROKEN.search(data) is None:
        return data  # as large as it is, it is not copied
    return _BROKEN.sub(_whole_frame, data)


def _whole_frame(match: re.Match[bytes]) -> bytes:
    return match[1] if _WHOLE.match(match[1] + match[2]) else match[0]
