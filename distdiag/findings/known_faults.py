"""Well-known faults of others, recognised by messages and stacks, from ``known_faults.toml``.

A row says what it matches, the cause, whose fault that is and what to do. Adding a fault is adding
a row.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

import msgspec

from distdiag.events.base import Frame, Value
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence

TABLE: Final = Path(__file__).with_suffix(".toml")

_COMPARISON: Final = re.compile(r"(>=|<=|==|<|>)(\d{1,6}(?:\.\d{1,6}){0,3})")
_MILD: Final = re.compile(
    r"\w{0,40}Warning: |(?<![=\w])(?:DEBUG|INFO|WARNING)\b"
    r"|^\W{0,4}[WI]\d{4}[ T]|\[[WI](?:\d{3,4})? "
)
_PREVIOUS: Final = re.compile(
    r"(Xid \([^()]{1,40}\): )\d{1,4}(,.{0,300}caused by previous Xid (\d{1,4}))"
)
"""The driver says of the work that it ended for which error it did so: that one counts."""
_HEAD: Final = 160
"""The level of a line stands in front of its text, behind times, names and places."""

Versions = Mapping[str, str]
"""By name of a library the version that is installed, such as ``{"torch": "2.13.0+cpu"}``."""


class KnownFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One row of the table; the head of ``known_faults.toml`` says what its fields mean."""

    id: str
    cause: str
    whose: Literal["program", "library", "machine", "launcher"]
    fix: str
    link: str
    words: tuple[str, ...] = ()
    pattern: str = ""
    types: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    library: str = ""
    versions: str = ""
    role: Literal["cause", "ambiguous", "general", "consequence", "harmless"] = "cause"
    where: Literal["logs", "exceptions", "kernel"] = "logs"
    blames: Literal["who-met-it", "others"] = "who-met-it"

    @cached_property
    def _searched(self) -> re.Pattern[str] | None:
        return re.compile(self.pattern) if self.pattern else None

    def says(self, text: str) -> bool:
        """Whether a message or a line is one of this fault."""
        if not any(word in text for word in self.words):
            return False
        return self._searched is None or self._searched.search(text) is not None

    def raises(self, type_name: str, message: str) -> bool:
        """Whether an exception of this type, with or without its module, is one of this fault."""
        if self.types and type_name.rpartition(".")[2] not in self.types:
            return False
        return self.says(f"{type_name}: {message}")

    def is_on(self, frames: Iterable[Frame]) -> bool:
        """Whether one stack holds all functions by which this fault is known."""
        stack = list(frames)
        return bool(self.frames) and all(
            any(_is_frame(wanted, frame) for frame in stack) for wanted in self.frames
        )

    def is_in(self, versions: Versions) -> bool:
        """Whether the installed version has this fault; one that is not known may have it."""
        installed = versions.get(self.library, "")
        if not (installed and self.versions):
            return True
        have = _numbers(installed)
        return all(_holds(have, sign, _numbers(bound)) for sign, bound in _bounds(self.versions))

    @property
    def title(self) -> str:
        """What happened in a few words: how the cause begins."""
        return re.split(r"[:.;] ", self.cause.rstrip("."), maxsplit=1)[0]

    def evidence(self, ranks: Iterable[int], said: str = "") -> Evidence:
        """Return which row this is, for the ranks that met it; `said` is what the row matched."""
        values: dict[str, Value] = {"said": said} if said else {}
        values |= {"known_fault": self.id, "whose": self.whose, "see": self.link}
        return Evidence(
            ranks=RankSet(ranks), summary=f"it is the known fault {self.id}", values=values
        )


@lru_cache(maxsize=1)
def known_faults() -> tuple[KnownFault, ...]:
    """Read the table, special rows first.

    Raises:
        ValueError: a row is wrong: the text names it.

    """
    return read_table(TABLE.read_text(encoding="utf-8"))


def read_table(text: str) -> tuple[KnownFault, ...]:
    """Read and verify a table of known faults.

    Raises:
        ValueError: it is no TOML, a row lacks a part or has an unknown one, an id comes twice, a
            pattern is not valid or not bounded, a range of versions cannot be read, or a link is
            not https.

    """
    try:
        rows = msgspec.convert(tomllib.loads(text).get("fault", []), tuple[KnownFault, ...])
    except msgspec.ValidationError as error:
        raise ValueError(f"a row of the known faults is wrong: {error}") from None
    seen: set[str] = set()
    for row in rows:
        for problem in _problems(row):
            raise ValueError(f"known fault {row.id}: {problem}")
        if row.id in seen:
            raise ValueError(f"known fault {row.id}: the id comes twice")
        seen.add(row.id)
    return rows


def fault_of_exception(
    type_name: str, message: str, versions: Versions | None = None
) -> KnownFault | None:
    """Return the first row that an exception fits."""
    rows = (row for row in known_faults() if row.raises(type_name, message))
    return _first(rows, versions or {})


def fault_of_line(line: str, versions: Versions | None = None) -> KnownFault | None:
    """Return the first row that a line of a log fits, unless the line is only a warning."""
    told = _PREVIOUS.sub(r"\1\3\2", line) if "caused by previous Xid" in line else line
    rows = (row for row in known_faults() if row.where != "exceptions" and row.says(told))
    found = _first(rows, versions or {})
    return None if found is None or _MILD.search(line, 0, _HEAD) else found


def fault_of_stack(frames: Iterable[Frame], versions: Versions | None = None) -> KnownFault | None:
    """Return the first row whose functions are all on a stack, innermost frame first."""
    stack = tuple(frames)
    return _first((row for row in known_faults() if row.is_on(stack)), versions or {})


def _first(rows: Iterator[KnownFault], versions: Versions) -> KnownFault | None:
    return next((row for row in rows if row.is_in(versions)), None)


def _is_frame(wanted: str, frame: Frame) -> bool:
    file, colon, function = wanted.rpartition(":")
    if colon and file.endswith(".py"):
        return frame.file.endswith(file) and frame.function == function
    return wanted in frame.function


# What a table must be


def _problems(row: KnownFault) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", row.id):
        yield "an id is words in small letters with hyphens between them"
    if not (row.words or row.frames):
        yield "it has neither words nor frames, so nothing matches it"
    if any(len(word) < 6 for word in row.words):
        yield "a word of less than six characters says too little"
    if not (row.cause.endswith(".") and row.fix.rstrip("…").endswith((".", "="))):
        yield "cause and fix are whole sentences"
    if not re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}/\S*", row.link):
        yield f"its link is not https: {row.link}"
    if row.pattern and (problem := _problem_of_pattern(row.pattern)):
        yield problem
    if row.versions and not (row.library and _is_range(row.versions)):
        yield f"a range of versions is a library and comparisons such as >=2.1,<2.4: {row.versions}"


def _problem_of_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"its pattern is not valid: {error}"
    # An escaped sign, or one in a set of characters, repeats nothing.
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern)
    if re.search(r"[*+]|\{\d*,\}", bare):
        return "its pattern is not bounded: say {0,200} in the place of * and +"
    return ""


def _is_range(text: str) -> bool:
    return all(_COMPARISON.fullmatch(part) for part in text.split(","))


def _bounds(text: str) -> Iterator[tuple[str, str]]:
    return ((match[1], match[2]) for match in _COMPARISON.finditer(text))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: those of ``2.13.0+cpu`` are (2, 13, 0)."""
    parts = re.split(r"[^\d.]", version.lstrip("v"), maxsplit=1)[0].split(".")
    numbers = [int(part) for part in takewhile(str.isdecimal, parts)]
    while numbers and numbers[-1] == 0:
        del numbers[-1]
    return tuple(numbers)


def _holds(have: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    match sign:
        case ">=":
            return have >= bound
        case "<=":
            return have <= bound
        case "<":
            return have < bound
        case ">":
            return have > bound
        case _:
            return have[: len(bound)] == bound
