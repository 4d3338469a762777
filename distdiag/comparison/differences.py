"""What differs between two runs, the likely causes first."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from distdiag.comparison.facts import ALL, ARGUMENT, OPTION, PLAN, Key, RunFacts
from distdiag.events.environment import FactKind
from distdiag.events.ranks import RankSet

_CORE: Final = frozenset({"torch", "CUDA of torch", "NCCL", "cuDNN", "Python"})
CORE_VERSION: Final = "core version"
_PLACES: Final = frozenset({"host", "number of the GPU", "folder"})
"""They differ from run to run, and seldom matter."""
_LAUNCHERS: Final = frozenset({"MASTER_ADDR", "PATH", "PYTHONPATH"})

_ORDER: Final = (
    FactKind.LAUNCH,
    ARGUMENT,
    FactKind.CODE,
    FactKind.SEED,
    FactKind.SETTING,
    CORE_VERSION,
    FactKind.VARIABLE,
    PLAN,
    FactKind.DEVICE,
    FactKind.VERSION,
    "trace",
    "outcome",
    OPTION,
    "unknown variable",
    "place",
)
"""What somebody changed comes before what follows of it; what nobody reads comes last."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is `before` in one run and `after` in the other; ``""``: it is not there.

    `ranks` are those on which it differs, none if it is of the whole run. `step` is the first at
    which it does, -1 before the first one, None for what has no steps. `details` are lines of a
    diff, or names of what differs alike.
    """

    kind: str
    name: str
    before: str
    after: str
    ranks: RankSet = field(default_factory=RankSet)
    step: int | None = None
    details: tuple[str, ...] = ()


def compare(a: RunFacts, b: RunFacts) -> tuple[Difference, ...]:
    """Return what differs, the most likely cause first."""
    found = [*_facts(a, b), *_plans(a, b), *_traces(a, b)]
    return tuple(sorted(found, key=_place))


def _place(difference: Difference) -> tuple[int, int, str]:
    step = difference.step if difference.step is not None else 0
    return (_ORDER.index(class_of(difference)), step, difference.name)


def class_of(difference: Difference) -> str:
    """Return the word by which differences are ordered: their kind, or a part of it."""
    kind, name = difference.kind, difference.name
    if name in _PLACES or name in _LAUNCHERS:
        return "place"
    if kind == FactKind.VERSION and name in _CORE:
        return CORE_VERSION
    values = (difference.before, difference.after)
    if kind == FactKind.VARIABLE and any(value.startswith("digest ") for value in values):
        return "unknown variable"
    return kind


def _facts(a: RunFacts, b: RunFacts) -> Iterator[Difference]:
    for key in dict.fromkeys((*a.facts, *b.facts)):
        if key[0] == PLAN or not _can_compare(key, a, b):
            continue
        difference = _fact(key, a, b)
        if difference is not None:
            yield difference


def _can_compare(key: Key, a: RunFacts, b: RunFacts) -> bool:
    """Say whether both runs have facts of this kind: a report has fewer than a run directory."""
    return all(any(kind == key[0] for kind, _ in run.facts) for run in (a, b)) or key[0] in (
        ARGUMENT,
        OPTION,
    )


def _fact(key: Key, a: RunFacts, b: RunFacts) -> Difference | None:
    mine, theirs = a.facts.get(key, {}), b.facts.get(key, {})
    if ALL in mine or ALL in theirs:
        before, after = _of_run(mine), _of_run(theirs)
        ranks: list[int] = []
        if before == after:
            return None
    else:
        ranks = sorted(r for r in mine.keys() | theirs.keys() if mine.get(r) != theirs.get(r))
        # With fewer ranks in one run, what the others had is no difference of its own.
        shared = [r for r in ranks if r in mine and r in theirs]
        if not ranks or (mine and theirs and not shared):
            return None
        first = (shared or ranks)[0]
        before, after = mine.get(first, ""), theirs.get(first, "")
    details = _diff(a.texts.get(key[1], ""), b.texts.get(key[1], ""))
    return Difference(str(key[0]), key[1], before, after, RankSet(ranks), details=details)


def _of_run(values: dict[int, str]) -> str:
    """Return the value of the whole run: its own, or the one on which all ranks agree."""
    if ALL in values:
        return values[ALL]
    distinct = sorted(set(values.values()))
    return distinct[0] if len(distinct) == 1 else ", ".join(distinct)


def _diff(before: str, after: str) -> tuple[str, ...]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return tuple(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _plans(a: RunFacts, b: RunFacts) -> Iterator[Difference]:
    """Yield tensors that are kept otherwise, those that differ alike as one."""
    mine = {key: value for key, value in a.facts.items() if key[0] == PLAN}
    theirs = {key: value for key, value in b.facts.items() if key[0] == PLAN}
    if not mine or not theirs:
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for key in dict.fromkeys((*mine, *theirs)):
        before, after = _of_run(mine.get(key, {})), _of_run(theirs.get(key, {}))
        if before != after:
            alike.setdefault((before, after), []).append(key[1])
    for (before, after), names in alike.items():
        yield Difference(PLAN, names[0], before, after, details=tuple(names[1:]))


def _traces(a: RunFacts, b: RunFacts) -> Iterator[Difference]:
    """Yield the first step from which on data, weights, gradients or rates differ."""
    for name in a.traces.keys() & b.traces.keys():
        mine, theirs = a.traces[name], b.traces[name]
        places = sorted(
            place for place in mine.keys() & theirs.keys() if mine[place] != theirs[place]
        )
        if places:
            step = places[0][0]
            ranks = RankSet(rank for at, rank in places if at == step)
            before, after = mine[places[0]], theirs[places[0]]
            yield Difference("trace", name, before, after, ranks, step)
