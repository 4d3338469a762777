"""Curves: read from logs, or given as numbers in the context; and what they tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from distdiag.diagnosis.causes import Evidence
from distdiag.diagnosis.context import Item
from distdiag.diagnosis.documents import Document, Documents
from distdiag.findings.finding import Severity
from distdiag.metrics.judging import Judgement, Kind, Observation, judge
from distdiag.metrics.reading import read
from distdiag.metrics.series import Curves, Series

_STEPS: Final = ("step", "steps", "iteration", "iterations", "iter", "epoch", "epochs", "x")
_VALUES: Final = ("value", "values", "y", "loss")
_ROLES: Final = {
    "loss": r"loss|train|training|train_losses"
    r"|(?:train(?:ing)?[/_. ])?(?:lm[ _])?(?:total[_ ])?loss",
    "val_loss": r"val|validation|eval|valid|test"
    r"|(?:val|valid|validation|eval|test)[/_. ]loss(?:es)?",
    "grad_norm": r"(?:train[/_.])?(?:grad|gradient|gradients)[ _]norms?",
    "lr": r"(?:train[/_.])?(?:lr|learning[ _]rate)s?",
    "loss_scale": r"(?:loss|grad)[ _]scale",
    "entropy": r"(?:policy[/_. ])?entropy",
    "kl": r"kl",
    "reward": r"(?:mean[ _])?rewards?",
}
"""Names of inline curves, by role; logs are named by their readers."""
MOST_VALUES: Final = 5_000_000

SICK: Final = (
    Kind.NOT_FINITE,
    Kind.DIVERGENCE,
    Kind.EXPLOSION,
    Kind.SPIKE,
    Kind.STUCK,
    Kind.PLATEAU,
    Kind.ZERO_GRADIENT,
    Kind.LOSS_SCALE,
    Kind.ENTROPY_COLLAPSE,
    Kind.REWARD_COLLAPSE,
)
BLOWN_UP: Final = (Kind.NOT_FINITE, Kind.DIVERGENCE, Kind.EXPLOSION)
NOT_LEARNING: Final = (Kind.STUCK, Kind.PLATEAU, Kind.ZERO_GRADIENT)


@dataclass(frozen=True)
class Measured:
    """The curves of a run, what they tell, and what could not be read."""

    curves: tuple[Curves, ...] = ()
    judgement: Judgement = field(default_factory=Judgement)
    problems: tuple[str, ...] = ()
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Artifact and name, by the path that a curve was read from."""

    def seen(self, *kinds: Kind) -> list[Observation]:
        """Return the observations of these kinds at warning or above."""
        return [each for each in self.judgement.of(*kinds) if each.severity is not Severity.INFO]

    def evidence(self, observation: Observation) -> tuple[Evidence, ...]:
        """Return the points of an observation as evidence, its message with the first."""
        found = []
        for number, point in enumerate(observation.evidence[:4]):
            artifact, name = self._place(point.file)
            found.append(
                Evidence(
                    artifact=artifact,
                    source=name,
                    line=point.line or None,
                    quote=observation.message if not number else _at(point.series, point.step),
                    value=point.value,
                )
            )
        if not found:
            artifact, name = self._place(observation.run)
            found.append(Evidence(artifact=artifact, source=name, quote=observation.message))
        return tuple(found)

    def of_kinds(self, *kinds: Kind) -> tuple[Evidence, ...]:
        """Return the evidence of the first observation of these kinds, nothing if there is none."""
        seen = self.seen(*kinds)
        return self.evidence(seen[0]) if seen else ()

    def series(self, role: str) -> list[tuple[Curves, Series]]:
        """Return all series of a role."""
        found = ((curves, curves.of(role)) for curves in self.curves)
        return [(curves, series) for curves, series in found if series is not None and len(series)]

    def point(self, curves: Curves, series: Series, place: int) -> Evidence:
        """Return one value as evidence."""
        artifact, name = self._place(str(curves.source))
        return Evidence(
            artifact=artifact,
            source=name,
            line=int(series.lines[place]) or None,
            quote=_at(series.name, float(series.steps[place])),
            value=f"{float(series.values[place]):.6g}",
        )

    def _place(self, file: str) -> tuple[str, str]:
        if file in self.places:
            return self.places[file]
        ends = [place for path, place in self.places.items() if Path(path).name == Path(file).name]
        return ends[0] if ends else ("training_logs", file)


def _at(series: str, step: float) -> str:
    return f"{series} at step {step:.10g}"


def measure(documents: Documents) -> Measured:
    """Read the curves of logs and those of the context, and judge them."""
    files = documents.of("training_logs", "loss_curves")
    reading = read([document.path for document in files]) if files else None
    inline = [curves for item in documents.data for curves in curves_of(item)]
    curves = tuple(chain(reading.curves if reading else (), inline))
    places = {str(document.path): (document.artifact, document.name) for document in files}
    places |= {str(each.source): ("loss_curves", each.source.name) for each in inline}
    return Measured(
        curves=curves,
        judgement=judge(curves),
        problems=tuple(_problems(documents, inline)),
        places=places,
    )


def _problems(documents: Documents, inline: Sequence[Curves]) -> Iterable[str]:
    if documents.data and not inline:
        yield "loss_curves: it holds no curve: give a list of numbers, or an object of lists"


# Curves that the context itself holds.


def curves_of(item: Item) -> list[Curves]:
    """Return the curves of a value: numbers, rows, or lists by name."""
    if isinstance(item.value, list):
        tables = [_of_list(item.value)]
    elif isinstance(item.value, dict):
        tables = [_of_object(item.value)]
    else:
        tables = []
    source = Path(item.name or "loss_curves (inline)")
    return [Curves(source, "inline", table, _roles(table)) for table in tables if table]


def _of_list(values: list[object]) -> dict[str, Series]:
    if values and all(isinstance(value, dict) for value in values):
        return _of_rows([value for value in values if isinstance(value, dict)])
    series = _series("loss", values, None)
    return {"loss": series} if series is not None else {}


def _of_rows(rows: list[dict[object, object]]) -> dict[str, Series]:
    """Return a series for each key of rows such as ``{"step": 1, "loss": 3.2}``."""
    names = [name for name in dict.fromkeys(str(k) for row in rows for k in row)]
    step = next((name for name in names if name.lower() in _STEPS), None)
    found = {}
    for name in names[:100]:
        with_it = [row for row in rows if row.get(name) is not None]
        steps = [row.get(step) for row in with_it] if step else None
        series = _series(name, [row[name] for row in with_it], steps)
        if name != step and series is not None:
            found[name] = series
    return found


def _of_object(given: dict[object, object]) -> dict[str, Series]:
    """Return a series for each list of ``{"steps": [...], "train": [...], "val": [...]}``."""
    named = {str(name): value for name, value in given.items()}
    step = next((n for n, v in named.items() if n.lower() in _STEPS and isinstance(v, list)), None)
    shared = named[step] if step else None
    found: dict[str, Series] = {}
    for name, value in list(named.items())[:100]:
        if isinstance(value, dict):
            inner = _of_object(value)
            value_name = next((n for n in inner if n.lower() in _VALUES), None)
            for key, series in inner.items():
                whole = name if key == value_name else f"{name}/{key}"
                found[whole] = Series(whole, series.steps, series.values, series.lines)
        elif isinstance(value, list) and name != step:
            if value and all(isinstance(row, dict) for row in value):
                table = _of_rows([row for row in value if isinstance(row, dict)])
                found |= {name if n in _VALUES else f"{name}/{n}": s for n, s in table.items()}
            elif (own := _series(name, value, shared)) is not None:
                found[name] = own
    return found


def _series(name: str, values: Sequence[object], steps: object) -> Series | None:
    if values and all(isinstance(v, list) and len(v) == 2 for v in values):
        pairs = [v for v in values if isinstance(v, list)]
        steps, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    places = list(steps) if isinstance(steps, list) else []
    if len(places) != len(values) or any(_number(place) is None for place in places):
        places = list(range(len(values)))
    rows = [(p, v) for p, v in zip(places, values, strict=True) if v is not None][:MOST_VALUES]
    places = [_number(place) for place, _ in rows]
    numbers = [_number(value) for _, value in rows]
    if not numbers or any(number is None for number in numbers):
        return None
    return Series(
        name,
        np.asarray(places, dtype=np.float64),
        np.asarray(numbers, dtype=np.float64),
        np.zeros(len(numbers), dtype=np.int64),
    )


def _number(value: object) -> float | None:
    """Return a number, which NaN and infinities are, too, also where they are texts."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _roles(table: Mapping[str, Series]) -> dict[str, str]:
    found: dict[str, str] = {}
    for role, pattern in _ROLES.items():
        for name in table:
            if re.fullmatch(pattern, name.lower()):
                found.setdefault(role, name)
    if "loss" not in found and len(table) == 1:
        found["loss"] = next(iter(table))
    return found


def documents_with_curves(measured: Measured, documents: Iterable[Document]) -> set[str]:
    """Return the names of the documents that held curves."""
    sources = {str(curves.source) for curves in measured.curves}
    return {document.name for document in documents if str(document.path) in sources}
