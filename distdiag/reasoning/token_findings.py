"""What a fault of numbered tokens becomes in a finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distdiag.finding import Evidence, Grade, Location, Severity
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.token_fault import FaultKind, TokenFault
from distdiag.sequence_event import FOREIGN, MIXED, PAD, TokenPassport

_MOST_SHOWN: Final = 64
_SIGNS: Final = {PAD: "pad", MIXED: "mixed", FOREIGN: "?"}
_CONFIDENCE: Final = {Grade.PROVEN: 0.97, Grade.LIKELY: 0.8, Grade.NOTE: 0.5}


def parts_of(fault: TokenFault, by_rank: Mapping[int, TokenPassport]) -> dict[str, Any]:
    """Return what `Check.finding` needs for a fault."""
    ranks = RankSet(fault.ranks)
    one = by_rank[min(ranks)]
    return {
        "message": f"{fault.stage} of {one.name} on {ranks.phrase()}: {fault.said}",
        "ranks": ranks,
        "step": one.step,
        "location": _location(fault, one),
        "subjects": (one.name, fault.stage, fault.kind.value),
        "severity": Severity.WARNING if fault.grade is Grade.LIKELY else None,
        "grade": fault.grade,
        "confidence": _CONFIDENCE[fault.grade],
        "evidence": tuple(
            Evidence(
                ranks=RankSet([rank]),
                summary=_saw(fault, passport),
                location=_location(fault, passport),
                values={"dtype": passport.spec.dtype, "dim": passport.spec.dim},
            )
            for rank, passport in by_rank.items()
        ),
    }


def _location(fault: TokenFault, one: TokenPassport) -> Location | None:
    stage = "gather" if fault.stage == "gradient" else fault.stage.removesuffix(" gradient")
    frame = dict(one.functions).get(stage)
    own = user_location((frame,)) if frame is not None else None
    return own or user_location(one.site.frames)


def _saw(fault: TokenFault, one: TokenPassport) -> str:
    if one.error:
        return f"{one.stage} raised {one.error}"
    if fault.stage in ("gradient", "attention gradient"):
        if fault.kind is FaultKind.ATTENTION_GRADIENT:
            return "gradients of {} in turn that reach this rank: {}".format(
                "queries, keys and values", " | ".join(map(_listed, one.gradients))
            )
        scales = one.scales if fault.stage == "gradient" else one.attended
        return f"gradients of the tokens, relative to those of the output: {_listed(scales)}"
    size = len(one.parts) // one.spec.batch
    holds = f"holds {_named(one.parts[:size])} of row 0 after the split, {list(one.part_shape)}"
    if fault.stage == "split":
        return holds
    if fault.stage == "attention":
        wrong = [context for context in one.contexts if context.token in fault.tokens]
        first = wrong[0] if wrong else next(iter(one.contexts), None)
        if first is None:
            return holds
        runs = ", ".join(
            f"{RankSet(range(begin, end))}{f' {count} times' if count > 1 else ''}"
            for begin, end, count in first.runs
        )
        return f"token {first.token % one.spec.length} attends to {runs or 'nothing'}"
    size = len(one.gathered) // one.spec.batch
    return (
        f"has {_named(one.gathered[:size])} in row 0 after the gather, {list(one.gathered_shape)}"
    )


def _named(tokens: tuple[int, ...]) -> str:
    shown = " ".join(_SIGNS.get(token, str(token)) for token in tokens[:_MOST_SHOWN])
    return f"tokens {shown or '(none)'}{' …' if len(tokens) > _MOST_SHOWN else ''}"


def _listed(values: tuple[float, ...]) -> str:
    shown = " ".join(f"{value:g}" for value in values[:_MOST_SHOWN])
    return f"{shown}{' …' if len(values) > _MOST_SHOWN else ''}"
