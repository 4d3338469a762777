"""What was looked at, how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.record.visible import visible


class State(StrEnum):
    """How it is."""

    GOOD = "ok"
    UNKNOWN = "?"
    DOUBTFUL = "warning"
    BAD = "problem"


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One thing that was looked at: how it is, what was seen, and what to do if it is not good."""

    subject: str
    state: State
    seen: str
    advice: str = ""


_WORST_FIRST: Final = (State.BAD, State.DOUBTFUL, State.UNKNOWN, State.GOOD)


def worst(answers: Iterable[Answer]) -> State:
    """Return the worst state of all answers."""
    found = {answer.state for answer in answers}
    return next((state for state in _WORST_FIRST if state in found), State.GOOD)


def lines(answers: Sequence[Answer]) -> list[str]:
    """Return a line for each answer, and one below it for what to do."""
    width = max((len(answer.subject) for answer in answers), default=0)
    found: list[str] = []
    for answer in answers:
        found.append(f"{answer.state:8} {answer.subject:{width}}  {answer.seen}".rstrip())
        if answer.advice and answer.state is not State.GOOD:
            found.append(f"{'':9}{'':{width}}  -> {answer.advice}")
    return list(map(visible, found))


def joined(by_rank: Mapping[int, Sequence[Answer]]) -> list[Answer]:
    """Return the answers of many nodes: one that all give alike is one answer.

    Of a subject on which nodes differ the ranks are told that look from each of them.
    """
    subjects: dict[str, dict[Answer, list[int]]] = {}
    for rank, answers in by_rank.items():
        for answer in answers:
            subjects.setdefault(answer.subject, {}).setdefault(answer, []).append(rank)
    found: list[Answer] = []
    for ranks_of in subjects.values():
        is_one = len(ranks_of) == 1 and len(next(iter(ranks_of.values()))) == len(by_rank)
        for answer, ranks in ranks_of.items():
            where = "" if is_one else f" ({RankSet(ranks).phrase()})"
            found.append(msgspec.structs.replace(answer, seen=f"{answer.seen}{where}"))
    return found
