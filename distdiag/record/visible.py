"""Texts of strangers, made safe to show: nothing in them steers a terminal, hides or turns around.

Names, paths, messages and lines of source come from dumps and programs that nobody vouches for.
Whatever shows one of them, at a terminal or in a form that a page or a code host shows, passes it
through here; what a form has signs of its own for (HTML, Markdown, XML) it escapes besides.
"""

import json
from typing import Final

import msgspec

TAB: Final = 4


def visible(text: str) -> str:
    r"""Spell out what could steer a terminal or hide: ESC becomes ``\x1b``, a newline ``\n``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    """Spell out the same in a text of several lines; a tab becomes spaces."""
    if text.isprintable():
        return text
    return "\n".join(visible(line.expandtabs(TAB)) for line in text.split("\n"))


def json_text(value: object, *, indent: int = 1) -> str:
    """Return a value as JSON with a newline at its end, in which nothing steers a terminal.

    Bytes that are no UTF-8, such as those of a path, are spelled out: as Python has them, JSON
    cannot.
    """
    try:
        text = msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = msgspec.json.encode(_encodable(msgspec.to_builtins(value)))
    lines = msgspec.json.format(text, indent=indent).decode().split("\n")
    return "".join(f"{line if line.isprintable() else _escaped(line)}\n" for line in lines)


def _escaped(line: str) -> str:
    """Write as JSON may, what JSON may hold as it is."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value
