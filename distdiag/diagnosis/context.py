"""The context: the JSON file that names artifacts, symptoms and limits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distdiag.diagnosis.files import read_whole
from distdiag.events.errors import DamagedFileError, UsageError

ARTIFACTS: Final = ("training_logs", "loss_curves", "model_code", "error_messages", "config")
FORMATS: Final = ("json", "markdown", "terminal")
DEFAULT_S: Final = 300.0
"""As long as one looks at it before going for a coffee; large logs are read at some 50 MB/s."""
MOST_BYTES: Final = 64 << 20
MOST_ITEMS: Final = 2_000
"""So many items of one artifact are taken."""

_NOT_FINITE: Final = ("nan", "inf", "infinity")
_TIME: Final = re.compile(r"\s*([\d.]{1,20})\s*([a-z]*)\s*$")
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}
_UNIT_WORDS: Final = {
    "sec": "s",
    "second": "s",
    "seconds": "s",
    "secs": "s",
    "min": "m",
    "mins": "m",
    "minute": "m",
    "minutes": "m",
    "hour": "h",
    "hours": "h",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One value of an artifact: a path, text, or data. `name` is the key that it had, if any."""

    artifact: str
    value: object
    name: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What is to be diagnosed. `folder` is where relative paths begin, `limit_s` the time."""

    folder: Path
    items: tuple[Item, ...]
    symptoms: tuple[str, ...]
    limit_s: float
    output_format: str
    warnings: tuple[str, ...]


def read_context(path: Path) -> Context:
    """Read a context.

    Raises:
        UsageError: the file cannot be read, or is no JSON object.

    """
    try:
        document = json.loads(read_whole(path, MOST_BYTES))  # with NaN, as Python writes it
    except DamagedFileError as error:
        raise UsageError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a JSON document: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a context is a JSON object with `artifacts` and `symptoms`")
    return _Reader(document).context(path.absolute().parent)


class _Reader:
    """Takes a document apart, and notes what it cannot use."""

    def __init__(self, document: Mapping[str, object]) -> None:
        self._document = document
        self._warnings: list[str] = []

    def context(self, folder: Path) -> Context:
        artifacts = self._section("artifacts")
        constraints = self._section("constraints")
        self._note_unknown("", self._document, ("artifacts", "symptoms", "constraints"))
        self._note_unknown("artifacts", artifacts, ARTIFACTS)
        self._note_unknown("constraints", constraints, ("max_analysis_time", "output_format"))
        items = tuple(self._items(artifacts))
        return Context(
            folder=folder,
            items=items,
            symptoms=tuple(self._symptoms()),
            limit_s=self._limit(constraints.get("max_analysis_time")),
            output_format=self._format(constraints.get("output_format")),
            warnings=tuple(self._warnings),
        )

    def _section(self, name: str) -> Mapping[str, object]:
        value = self._document.get(name)
        if isinstance(value, dict):
            return value
        if value is not None:
            self._warnings.append(f"`{name}` is not an object, and was not used")
        return {}

    def _note_unknown(
        self, where: str, given: Mapping[str, object], known: tuple[str, ...]
    ) -> None:
        for key in given:
            if key not in known:
                name = f"{where}.{key}" if where else key
                self._warnings.append(
                    f"`{name[:80]}` is not known, and was not used (known: {', '.join(known)})"
                )

    def _items(self, artifacts: Mapping[str, object]) -> Iterator[Item]:
        for artifact in ARTIFACTS:
            given = list(_split(artifact, artifacts.get(artifact)))
            if len(given) > MOST_ITEMS:
                self._warnings.append(
                    f"`artifacts.{artifact}` has {len(given)} items: the first {MOST_ITEMS} were "
                    "used"
                )
            yield from given[:MOST_ITEMS]

    def _symptoms(self) -> Iterator[str]:
        given = self._document.get("symptoms")
        values = given if isinstance(given, list) else [] if given is None else [given]
        for value in values[:MOST_ITEMS]:
            if isinstance(value, str):
                yield value
            else:
                self._warnings.append("a symptom that is not a text was not used")

    def _limit(self, value: object) -> float:
        if value is None:
            return DEFAULT_S
        seconds = _seconds(value)
        if seconds is None:
            self._warnings.append(
                "`constraints.max_analysis_time` is not a positive number of seconds, nor a text "
                f'such as "5 minutes": {DEFAULT_S:.0f} s were used'
            )
            return DEFAULT_S
        return seconds

    def _format(self, value: object) -> str:
        if value in FORMATS:
            return str(value)
        if value is not None:
            self._warnings.append(
                f"`constraints.output_format` is none of {', '.join(FORMATS)}: json was used"
            )
        return FORMATS[0]


def _split(artifact: str, value: object) -> Iterator[Item]:
    """Yield the parts of an artifact: the items of a list, or the named texts of an object."""
    if value is None or value in ("", [], {}):
        return
    if isinstance(value, list) and not _is_data(artifact, value):
        for part in value:
            yield from () if part is None else (Item(artifact, part),)
    elif artifact != "config" and isinstance(value, dict) and _has_texts(value):
        for name, part in value.items():
            yield Item(artifact, part, str(name))
    else:
        yield Item(artifact, value)


def _is_data(artifact: str, values: list[object]) -> bool:
    """Whether a list is a curve or rows of one, and no list of paths; JSON writes NaN as a text."""
    return artifact == "loss_curves" and not any(
        isinstance(value, str) and value.lower().lstrip("+-") not in _NOT_FINITE for value in values
    )


def _has_texts(value: dict[object, object]) -> bool:
    return all(isinstance(part, str) for part in value.values())


def _seconds(value: object) -> float | None:
    if isinstance(value, str):
        match = _TIME.match(value.lower())
        unit = _UNITS.get(_UNIT_WORDS.get(match[2], match[2])) if match else None
        try:
            value = float(match[1]) * unit if match and unit else None
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
