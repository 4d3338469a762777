"""A diagnosis as JSON, Markdown, or text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from distdiag.diagnosis.causes import Cause, Evidence
from distdiag.diagnosis.result import Diagnosis
from distdiag.record.visible import json_text, visible

_WIDTH: Final = 100
_LONGEST: Final = 2_000


def as_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as one JSON object, indented."""
    return json_text(diagnosis, indent=2)


def as_markdown(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as a page; what strangers wrote is escaped."""
    return "\n".join(_page(diagnosis)) + "\n"


def _page(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"# Diagnosis: {diagnosis.status}\n"
    yield f"{_escaped(diagnosis.summary)}.\n"
    for title, causes in (("Root causes", diagnosis.root_causes), ("Possible", diagnosis.possible)):
        if causes:
            yield f"## {title}\n"
        for number, cause in enumerate(causes, 1):
            yield from _section(number, cause)
    lists = {
        "Quick fixes": diagnosis.quick_fixes,
        "What to bring": [f"{m.artifact}: {m.why}" for m in diagnosis.missing_artifacts],
        "Left out": diagnosis.left_out,
        "Warnings": diagnosis.warnings,
        "Looked at": list(_looked_at(diagnosis)),
    }
    for title, items in lists.items():
        if items:
            yield f"## {title}\n"
            yield "\n".join(f"- {_escaped(item)}" for item in items) + "\n"


def _section(number: int, cause: Cause) -> Iterator[str]:
    yield f"### {number}. {_escaped(_capital(cause.issue))}\n"
    yield f"{cause.severity}, confidence {cause.confidence:.2f}: {_escaped(cause.reason)}.\n"
    for each in cause.evidence:
        yield f"- {_escaped(_place(each))}: {_code(_what(each))}"
    yield f"\n**Fix:** {_escaped(cause.fix)}\n"


def as_text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as plain lines; control characters are spelled out."""
    return "\n".join(_text(diagnosis)) + "\n"


def _text(diagnosis: Diagnosis) -> Iterator[str]:
    yield from _wrapped(f"{diagnosis.status}: {diagnosis.summary}", "")
    for title, causes in (
        ("root causes", diagnosis.root_causes),
        ("possible, not sure enough to be called a cause", diagnosis.possible),
    ):
        if causes:
            yield f"\n{title}"
        for cause in causes:
            yield from _wrapped(f"{cause.confidence:.2f}  {cause.severity}: {cause.issue}", "  ")
            for each in cause.evidence:
                yield from _wrapped(f"{_place(each)}: {_what(each)}", "        ")
            yield from _wrapped(f"fix: {cause.fix}", "        ")
            yield from _wrapped(f"why so sure: {cause.reason}", "        ")
    for title, items in (
        ("quick fixes", list(diagnosis.quick_fixes)),
        ("what to bring", [f"{m.artifact}: {m.why}" for m in diagnosis.missing_artifacts]),
        ("left out", list(diagnosis.left_out)),
        ("warnings", list(diagnosis.warnings)),
        ("looked at", list(_looked_at(diagnosis))),
    ):
        if items:
            yield f"\n{title}"
        for item in items:
            yield from _wrapped(item, "  ")


def _looked_at(diagnosis: Diagnosis) -> Iterator[str]:
    for each in diagnosis.analysis_artifacts:
        what = ", ".join(each.used) or "not used"
        lines = f", {each.num_lines} lines" if each.num_lines else ""
        problem = f" ({each.problem})" if each.problem else ""
        yield f"{each.artifact} {each.source}: {what}{lines}{problem}"


def _place(evidence: Evidence) -> str:
    source = evidence.source or evidence.artifact
    return f"{source}:{evidence.line}" if evidence.line else source


def _what(evidence: Evidence) -> str:
    if evidence.value is None or str(evidence.value) in evidence.quote:
        return evidence.quote
    return f"{evidence.quote} = {evidence.value}" if evidence.quote else str(evidence.value)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        visible(" ".join(text.split()))[:_LONGEST],
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", visible(" ".join(text.split())))


def _code(text: str) -> str:
    """Return a text as code, with a fence that is longer than any in it."""
    text = visible(" ".join(text.split()))
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if longest else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


FORMATS: Final[Mapping[str, Callable[[Diagnosis], str]]] = {
    "json": as_json,
    "markdown": as_markdown,
    "terminal": as_text,
}
