"""What can be wrong with tokens that went through a program's sequence parallelism."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from distdiag.events.ranks import RankSet
from distdiag.events.sequences import TokenSpec
from distdiag.findings.finding import Grade


class FaultKind(StrEnum):
    """What happened to the tokens."""

    RAISED = "raised"
    LOST = "lost"
    DUPLICATED = "duplicated"
    PADDED = "padded"
    PERMUTED = "permuted"
    OTHER_PART = "other-part"
    MIXED = "mixed"
    FOREIGN = "foreign"
    WRONG_DIM = "wrong-dim"
    GRADIENT = "gradient"
    CONTEXT = "context"
    ATTENTION_GRADIENT = "attention-gradient"


class TokenFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: in which stage, on which ranks, and of which tokens.

    Token `i` of row `r` has the number ``r * length + i``. `said` is a sentence without the ranks.
    """

    kind: FaultKind
    stage: str
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    said: str
    grade: Grade = Grade.PROVEN

    def __str__(self) -> str:
        return f"{self.stage}, {RankSet(self.ranks).phrase()}: {self.said}"


def tokens_phrase(spec: TokenSpec, tokens: Iterable[int]) -> str:
    """Return ``tokens 3-5``, or ``tokens 3-5 of row 1`` if other rows have others."""
    by_row: dict[int, list[int]] = {}
    for token in tokens:
        by_row.setdefault(token // spec.length, []).append(token % spec.length)
    rows = {row: RankSet(positions) for row, positions in sorted(by_row.items())}
    if len(rows) == spec.batch and len(set(rows.values())) == 1:
        return _phrase(next(iter(rows.values())))
    return ", ".join(f"{_phrase(places)} of row {row}" for row, places in rows.items())


def _phrase(places: RankSet) -> str:
    return f"token {places}" if len(places) == 1 else f"tokens {places}"
