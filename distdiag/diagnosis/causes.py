"""Issues, the clues that speak for them, and how much several clues carry together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from distdiag.findings.finding import Severity

# How much one clue carries. docs/diagnose.md explains them to readers; a test holds their ends.

SPOKEN: Final = 0.9
"""The program itself names the cause: an exception, a warning with its reason."""
SHOWN: Final = 0.7
"""An artifact shows the fault itself: a line of code, two settings that contradict each other."""
FITS: Final = 0.4
"""What is seen fits this issue, and others too."""
SAID: Final = 0.2
"""The words of whoever wrote the context."""
CAUSE: Final = 0.5
"""What carries less is an idea, and is not called a cause."""
MOST: Final = 0.95
"""Artifacts prove nothing: the run was not observed."""

_SOURCES: Final = {
    "training_logs": "the run",
    "loss_curves": "the run",
    "error_messages": "the run",
    "model_code": "the code",
    "config": "the configuration",
    "symptoms": "the symptoms",
}
"""Whose word an artifact is. A log, a curve and an error of one run are one witness: a message is
often in two of them, and a curve is read from a log."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one artifact says, for a reader to verify: a quotation or a value, with its line."""

    artifact: str
    source: str = ""
    line: int | None = None
    quote: str = ""
    value: float | int | str | None = None


class Issue(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault. `title` says what is wrong, `fix` what to do.

    `quick` is the fix in a few words, as a change to a line. `wants` are the artifacts that would
    show it more surely, with what each would show. `explains` are ids of issues that are nothing
    but this one's effect.
    """

    id: str
    title: str
    severity: Severity
    fix: str
    quick: str = ""
    wants: tuple[tuple[str, str], ...] = ()
    explains: tuple[str, ...] = ()
    is_general: bool = False
    """It says only that something failed: what explains the same line says more."""


@dataclass(frozen=True, slots=True)
class Clue:
    """What speaks for an issue. `says` is the issue with the figures of this run."""

    issue: Issue
    weight: float
    evidence: tuple[Evidence, ...]
    says: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        """Refuse a clue without evidence: it would be a claim."""
        assert self.evidence, self.issue.id


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """An issue with all that speaks for it. `reason` says why the confidence is what it is."""

    id: str
    issue: str
    severity: Severity
    evidence: tuple[Evidence, ...]
    fix: str
    confidence: float
    reason: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """An issue, its clues, and the cause that they make."""

    issue: Issue
    cause: Cause

    @property
    def is_cause(self) -> bool:
        """Whether it may be called a cause."""
        return self.cause.confidence >= CAUSE


def weigh(clues: Iterable[Clue]) -> list[Weighed]:
    """Put the clues of each issue together, and give effects to their causes; surest first."""
    by_issue: dict[str, list[Clue]] = {}
    for clue in clues:
        by_issue.setdefault(clue.issue.id, []).append(clue)
    found = {name: _weighed(of_issue) for name, of_issue in by_issue.items()}
    _drop_general(found)
    causes = [name for name, each in found.items() if each.is_cause]
    for name in sorted(causes, key=lambda each: _rank(found[each])):
        effects = found[name].issue.explains if name in found else ()
        for effect in effects:
            if effect in found and effect != name:
                by_issue[name] += _as_effects(by_issue[effect], found[name])
                found[name] = _weighed(by_issue[name])
                del found[effect]
    return sorted(found.values(), key=_rank)


def _drop_general(found: dict[str, Weighed]) -> None:
    """Leave out what says only that something failed, where a cause rests on the same line."""
    explained = {
        (each.artifact, each.source, each.line)
        for weighed in found.values()
        if weighed.is_cause and not weighed.issue.is_general
        for each in weighed.cause.evidence
        if each.line is not None
    }
    for name, weighed in list(found.items()):
        places = [(e.artifact, e.source, e.line) for e in weighed.cause.evidence]
        if weighed.issue.is_general and explained.intersection(places):
            del found[name]


def _rank(weighed: Weighed) -> tuple[float, int]:
    return -weighed.cause.confidence, -weighed.issue.severity.weight


def _as_effects(clues: Sequence[Clue], cause: Weighed) -> list[Clue]:
    """Return the clues of an effect as clues of its cause: they fit it."""
    return [Clue(cause.issue, min(clue.weight, FITS), clue.evidence) for clue in clues]


def _weighed(clues: Sequence[Clue]) -> Weighed:
    best: dict[str, float] = {}
    for clue in clues:
        for source in {_SOURCES[each.artifact] for each in clue.evidence}:
            best[source] = max(best.get(source, 0.0), clue.weight)
    confidence = _together(clues, best)
    strongest = max(clues, key=lambda clue: (clue.weight, bool(clue.says)))
    issue = strongest.issue
    evidence = dict.fromkeys(each for clue in clues for each in clue.evidence)
    return Weighed(
        issue,
        Cause(
            id=issue.id,
            issue=strongest.says or issue.title,
            severity=issue.severity,
            evidence=tuple(evidence),
            fix=strongest.fix or issue.fix,
            confidence=round(confidence, 2),
            reason=_reason(clues, best, confidence),
        ),
    )


def _together(clues: Sequence[Clue], best: dict[str, float]) -> float:
    """Return the confidence: 1 - (1 - a)(1 - b)... over independent witnesses.

    A clue with evidence of two witnesses counts once, for the one where it is the most needed:
    each witness gives the weight of its best clue, but one clue never gives two.
    """
    given: dict[str, float] = {}
    for clue in sorted(clues, key=lambda clue: -clue.weight):
        sources = sorted({_SOURCES[each.artifact] for each in clue.evidence})
        free = [source for source in sources if source not in given]
        if free:
            given[free[0]] = clue.weight
    doubt = 1.0
    for weight in given.values():
        doubt *= 1 - weight
    confidence = 1 - doubt
    has_seen_it = max(best.values()) >= SHOWN or best.keys() & {"the run", "the symptoms"}
    # What only might be wrong, in a run of which nothing is known to be wrong, is an idea.
    return min(confidence, MOST) if has_seen_it else min(confidence, FITS)


def _reason(clues: Sequence[Clue], best: dict[str, float], confidence: float) -> str:
    sources = [source for source, _ in sorted(best.items(), key=lambda pair: -pair[1])]
    most = max(clue.weight for clue in clues)
    if most >= SPOKEN:
        first = "a message names it"
    elif most >= SHOWN:
        first = "an artifact shows the fault itself"
    else:
        first = "what is seen fits it, and other causes too"
    witnesses = " and ".join([", ".join(sources[:-1]), sources[-1]] if sources[1:] else sources)
    agree = f"; {witnesses} agree" if sources[1:] else f"; only {witnesses} speaks for it"
    return f"{first}{agree}" + ("" if confidence >= CAUSE else ": not enough to call it a cause")
