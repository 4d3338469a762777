"""The notebook: a page of Markdown that people edit, and to whose sections entries are added.

What is read back are the headings of entries (``### H1 …``) and their items (``- result: failed``);
all else that stands in the page is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.record.visible import visible

HYPOTHESES: Final = "Hypotheses"
EXPERIMENTS: Final = "Experiments"
CONCLUSION: Final = "Conclusion"
OPEN: Final = "?"
"""Stands for an answer that nobody has given yet."""
QUESTIONS: Final = ("symptom", "expected", "since when", "reproducible")

_HEADING: Final = re.compile(r"### ([HE])(\d+) (.*)")
_ITEM: Final = re.compile(r"- ([a-z ]+): (.*)")
_NOTES: Final = {
    HYPOTHESES: "The most likely one first. Each names what would confirm it and what would refute "
    "it.",
    EXPERIMENTS: "One change each: what two changes did together tells nothing of either.",
    CONCLUSION: "Written by `distdiag case close`.",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A hypothesis (``H1``) or an experiment (``E1``), and what its items say."""

    name: str
    title: str
    items: Mapping[str, str]

    def says(self, item: str) -> str:
        """Return what an item says, nothing where it is not there or open."""
        answer = self.items.get(item, "").strip()
        return "" if answer == OPEN else answer


def new_notebook(answers: Mapping[str, str]) -> str:
    """Return an empty notebook that answers some of the `QUESTIONS`."""
    lines = [f"# Case: {one_line_of(answers['symptom'])}", ""]
    lines += [f"- {each}: {one_line_of(answers.get(each) or OPEN)}" for each in QUESTIONS]
    for title, note in _NOTES.items():
        lines += ["", f"## {title}", "", note]
    return "\n".join(lines) + "\n"


def read_notebook(path: Path) -> str:
    """Return the text of a notebook.

    Raises:
        UsageError: it cannot be read.
        DamagedFileError: it is something else.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    missing = [title for title in _NOTES if f"## {title}" not in text.split("\n")]
    if missing:
        raise DamagedFileError(f'{path}: no notebook of a case: it has no "## {missing[0]}"')
    return text


def answers_of(text: str) -> dict[str, str]:
    """Return what stands before the first section."""
    return _items(text.split("\n## ", 1)[0].split("\n"))


def entries_of(text: str, kind: str) -> tuple[Entry, ...]:
    """Return the hypotheses (``H``) or experiments (``E``), in their order in the notebook."""
    lines = text.split("\n")
    is_inside = _in_code(lines)
    starts = [n for n, line in enumerate(lines) if line.startswith("##") and not is_inside[n]]
    found = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = _HEADING.fullmatch(lines[start])
        if heading is not None and heading[1] == kind:
            items = _items(lines[start + 1 : end])
            found.append(Entry(f"{kind}{heading[2]}", heading[3], items))
    return tuple(found)


def with_entry(text: str, kind: str, title: str, body: Iterable[str]) -> tuple[str, str]:
    """Return the notebook with one more hypothesis or experiment, and the name of that."""
    numbers = (int(entry.name[1:]) for entry in entries_of(text, kind))
    name = f"{kind}{max(numbers, default=0) + 1}"
    section = HYPOTHESES if kind == "H" else EXPERIMENTS
    return with_lines(text, section, ["", f"### {name} {one_line_of(title)}", "", *body]), name


def with_lines(text: str, section: str, more: Iterable[str]) -> str:
    """Return the notebook with lines at the end of a section."""
    lines = text.split("\n")
    is_inside = _in_code(lines)
    begin = lines.index(f"## {section}")
    later = (n for n in range(begin + 1, len(lines)) if lines[n].startswith("## "))
    end = next((n for n in later if not is_inside[n]), len(lines))
    while not lines[end - 1].strip():
        end -= 1
    rest = lines[end:] if any(lines[end:]) else [""]
    return "\n".join([*lines[:end], *more, *rest])


def item(name: str, says: str) -> str:
    """Return an item of an entry."""
    return f"- {name}: {one_line_of(says)}"


def one_line_of(text: str) -> str:
    """Return a text that cannot begin another entry, nor steer a terminal."""
    return visible(" ".join(text.split()))


def _items(lines: Iterable[str]) -> dict[str, str]:
    found = (_ITEM.fullmatch(line) for line in lines)
    return {match[1]: match[2] for match in found if match is not None}


def _in_code(lines: list[str]) -> list[bool]:
    """Say of each line whether it stands in a block of code, which may hold any text."""
    fences: Iterator[int] = accumulate(line.startswith("```") for line in lines)
    return [number % 2 == 1 for number in fences]
