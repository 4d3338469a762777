"""What the program said: rows of the tables of known messages, in logs and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Final

from distdiag.diagnosis.causes import FITS, SPOKEN, Clue, Issue
from distdiag.diagnosis.documents import Document
from distdiag.diagnosis.facts import Facts, spoken
from distdiag.dumps.logs.known_fault_lines import any_of
from distdiag.dumps.logs.survival import SURVIVED_AFTER
from distdiag.findings.finding import Severity
from distdiag.findings.known_faults import KnownFault, fault_of_line, known_faults, read_table

TABLE: Final = Path(__file__).parents[1] / "messages.toml"

_EFFECTS: Final = {
    "parameter-shape-in-checkpoint": ("state-dict-mismatch",),
    "target-broadcast": ("plateau",),
    "checkpoint-without-inputs": ("stuck", "plateau", "no-gradient-graph"),
    "empty-parameter-list": ("HNG001",),
}
_WANTS: Final = {
    "exceptions": (("model_code", "the lines that the traceback names"),),
    "logs": (("training_logs", "the whole log: what came before and after"),),
}
_DYING: Final = re.compile(
    r"rror|WARN|raceback|ail(?:ed|ure)|exit|kill|closing signal|SIG[A-Z]{3}|^\s|^frame #|^[-=]{4}"
)


@lru_cache(maxsize=1)
def messages() -> tuple[KnownFault, ...]:
    """Read the table of messages of torch and trainers."""
    return read_table(TABLE.read_text(encoding="utf-8"))


def row_of(line: str) -> KnownFault | None:
    """Return the row that a line fits: of the messages, else of the known faults."""
    own = next((row for row in messages() if row.says(line)), None)
    if own is not None:
        return own
    found = fault_of_line(line)
    if found is None:
        found = next((r for r in known_faults() if r.where == "exceptions" and r.says(line)), None)
    return found if found is not None and found.role != "harmless" else None


def issue_of(row: KnownFault) -> Issue:
    """Return a row as an issue."""
    is_fatal = row.where != "logs" or row in known_faults()
    return Issue(
        id=row.id,
        title=row.cause.rstrip("."),
        severity=Severity.ERROR if is_fatal else Severity.WARNING,
        fix=row.fix,
        wants=_WANTS.get(row.where, ()),
        explains=_EFFECTS.get(row.id, ()),
    )


def known_messages(facts: Facts) -> Iterator[Clue]:
    """Yield each row that a line of the run fits, consequences only where nothing else was said."""
    found: dict[str, tuple[KnownFault, Document, int, str]] = {}
    for document in facts.documents.of("error_messages", "training_logs"):
        for row, number, line in _lasting(document):
            found.setdefault(row.id, (row, document, number, line))
    causes = [each for each in found.values() if each[0].role == "cause"]
    for row, document, number, line in causes or found.values():
        weight = SPOKEN if row.role == "cause" else FITS
        yield Clue(issue_of(row), weight, (spoken(document, number, line),))


def _lasting(document: Document) -> Iterator[tuple[KnownFault, int, str]]:
    """Yield the rows that lines of a document fit, without errors that the run survived."""
    pending: list[tuple[KnownFault, int, str]] = []
    for piece in document.pieces:
        behind = 0
        for place in _worth_looking(piece.lines):
            line = piece.lines[place]
            row = row_of(line)
            if row is None:
                continue
            if row in messages() and row.where == "logs":
                yield row, piece.first + place, line
                continue
            if pending and _is_survived(piece.lines[behind:place]):
                pending.clear()
            pending.append((row, piece.first + place, line))
            behind = place + 1
        if document.artifact != "error_messages" and _is_survived(piece.lines[behind:]):
            pending.clear()
    yield from pending


def _worth_looking(lines: Sequence[str]) -> Iterator[int]:
    """Yield the places of the lines that hold a word of a table, which most lines do not."""
    data = "\n".join(lines).encode()
    place, end = 0, 0
    last = -1
    for match in _any_word().finditer(data):
        place += data.count(b"\n", end, match.start())
        end = match.start()
        if place != last:
            last = place
            yield place


@lru_cache(maxsize=1)
def _any_word() -> re.Pattern[bytes]:
    words = {word.encode() for row in (*messages(), *known_faults()) for word in row.words}
    return any_of(sorted(words, reverse=True))


def _is_survived(lines: Sequence[str]) -> bool:
    """Whether so many calm lines follow that the run went on."""
    calm = (line for line in lines if _DYING.search(line) is None)
    return sum(1 for _ in islice(calm, SURVIVED_AFTER)) >= SURVIVED_AFTER


RULES: Final = (known_messages,)
