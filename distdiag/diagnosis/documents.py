"""The artifacts as documents: texts with lines, and files that other readers understand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from distdiag.diagnosis.context import Context, Item
from distdiag.diagnosis.files import Piece, files_below, read_pieces
from distdiag.events.errors import DamagedFileError

_ENDINGS: Final = {"model_code": ".py", "config": ".json"}
"""How the file of an inline text is called; ``.log`` for the others."""
_PATH: Final = re.compile(r"[\w./~@+=, -]{1,400}")
_FILE_NAME: Final = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,9}$")
_LONGEST_PATH: Final = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One file or inline text of an artifact. `name` is what the context calls it."""

    artifact: str
    name: str
    path: Path
    pieces: tuple[Piece, ...] = ()

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Yield the lines with their numbers, from 1."""
        for piece in self.pieces:
            yield from enumerate(piece.lines, piece.first)

    @property
    def text(self) -> str:
        """The text, as far as it is held: a file that is beyond the limits has a gap."""
        return "\n".join(line for piece in self.pieces for line in piece.lines)

    @property
    def num_lines(self) -> int:
        """How many lines are held."""
        return sum(len(piece.lines) for piece in self.pieces)


@dataclass(slots=True)
class Documents:
    """All that a context names: what was read, data of loss curves, and what cannot be used."""

    all: list[Document] = field(default_factory=list)
    data: list[Item] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Artifact and one sentence."""

    def of(self, *artifacts: str) -> list[Document]:
        """Return the documents of some artifacts."""
        return [document for document in self.all if document.artifact in artifacts]


def collect(context: Context, scratch: Path) -> Documents:
    """Read the artifacts of a context; inline texts become files in `scratch`."""
    documents = Documents()
    for number, item in enumerate(context.items, 1):
        _Collector(context.folder, scratch, number, documents).take(item)
    return documents


@dataclass(frozen=True, slots=True)
class _Collector:
    folder: Path
    scratch: Path
    number: int
    documents: Documents

    def take(self, item: Item) -> None:
        value = item.value
        if not isinstance(value, str):
            self._take_data(item)
        elif "\n" in value or len(value) > _LONGEST_PATH:
            self._take_text(item, value)
        else:
            self._take_line(item, value)

    def _take_data(self, item: Item) -> None:
        if item.artifact == "loss_curves" and isinstance(item.value, list | dict):
            self.documents.data.append(item)
        elif isinstance(item.value, dict | list):
            text = msgspec.json.format(msgspec.json.encode(item.value), indent=2).decode()
            self._take_text(item, text)
        else:
            self._problem(item, f"{item.value!r:.60} is neither a path nor a text")

    def _take_line(self, item: Item, value: str) -> None:
        path = self.folder / Path(value)
        kind = _kind(path)
        if kind == "folder":
            ending = ".py" if item.artifact == "model_code" else ""
            for file in files_below(path, ending):
                self._take_file(item, file, str(Path(value) / file.relative_to(path)))
        elif kind:
            self._take_file(item, path, value)
        elif _PATH.fullmatch(value) and (_FILE_NAME.search(value) or "/" in value.strip("/")):
            self._problem(item, f"{value}: no such file or folder")
        else:
            self._take_text(item, value)

    def _take_file(self, item: Item, path: Path, name: str) -> None:
        try:
            pieces = read_pieces(path)
        except DamagedFileError as error:
            self._problem(item, str(error).replace(str(path), name))
        else:
            self.documents.all.append(Document(item.artifact, name, path, pieces))

    def _take_text(self, item: Item, text: str) -> None:
        folder = self.scratch / f"{self.number}"
        folder.mkdir()
        path = folder / f"{item.artifact}{_ENDINGS.get(item.artifact, '.log')}"
        path.write_text(text, encoding="utf-8", errors="replace")
        name = item.name or f"{item.artifact} (inline)"
        self.documents.all.append(Document(item.artifact, name, path, read_pieces(path)))

    def _problem(self, item: Item, text: str) -> None:
        self.documents.problems.append((item.artifact, text))


def _kind(path: Path) -> str:
    """Return "folder", "file" (of whatever kind), or "" where nothing is."""
    try:
        return "folder" if path.is_dir() else "file" if path.exists() else ""
    except (OSError, ValueError):
        return ""


def short_of(text: str, length: int = 240) -> str:
    """Return a line as a quotation: stripped, in one piece, and not too long."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 1]}…"
