"""By what the gradients of tokens were multiplied on their way back, over all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from distdiag.finding import Grade
from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.sequence_event import TokenPassport, TokenSpec

_ROOM = 0.02

Scales = Mapping[int, Sequence[float]]


def gradient_faults(by_rank: Mapping[int, TokenPassport]) -> Iterator[TokenFault]:
    """Yield what is wrong with the gradients that came back through split and gather."""
    passports = list(by_rank.values())
    spec = passports[0].spec
    if any(len(one.scales) != spec.num_tokens for one in passports):
        return
    scales = {rank: one.scales for rank, one in by_rank.items()}
    yield from _faults(spec, scales, "gradient", spec.reduction)


def attention_gradient_faults(by_rank: Mapping[int, TokenPassport]) -> Iterator[TokenFault]:
    """Yield what is wrong with the gradients that came back through attention as well.

    What split and gather do to them is known, and left out.
    """
    passports = list(by_rank.values())
    spec = passports[0].spec
    if any(len(one.attended) != spec.num_tokens for one in passports):
        return
    counts = [spec.num_attending(position) for position in range(spec.length)] * spec.batch
    scales = {
        rank: [value / count for value, count in zip(one.attended, counts, strict=True)]
        for rank, one in by_rank.items()
    }
    found = list(_faults(spec, scales, "attention gradient", ""))
    plain = {rank: one.scales for rank, one in by_rank.items()}
    factor, before = _factor(spec, scales), _factor(spec, plain)
    yield from (fault for fault in found if fault.grade is not Grade.NOTE)
    if factor and before and not _is_near(factor, before):
        yield TokenFault(
            kind=FaultKind.GRADIENT,
            stage="attention gradient",
            ranks=tuple(by_rank),
            tokens=tuple(range(spec.num_tokens)),
            said=f"attention multiplies the gradients of all values by {factor / before:g}",
        )


def _faults(spec: TokenSpec, scales: Scales, stage: str, reduction: str) -> Iterator[TokenFault]:
    def fault(ranks: Sequence[int], tokens: Sequence[int], said: str) -> TokenFault:
        kind = FaultKind.GRADIENT
        return TokenFault(kind=kind, stage=stage, ranks=(*ranks,), tokens=(*tokens,), said=said)

    odd = {rank: [t for t, s in enumerate(each) if math.isnan(s)] for rank, each in scales.items()}
    if any(odd.values()):
        for rank, tokens in odd.items():
            if tokens:
                said = f"the gradient of {tokens_phrase(spec, tokens)} is not that of its output"
                yield fault([rank], tokens, said)
        return
    sums = _sums(scales)
    lost = [token for token, value in enumerate(sums) if value == 0]
    if lost:
        said = f"no gradient comes back to {tokens_phrase(spec, lost)} on any rank"
        yield fault([*scales], lost, said)
        return
    is_whole = _is_whole(scales)
    usual = (
        _usual(value for each in scales.values() for value in each) if is_whole else _usual(sums)
    )
    looked = scales if is_whole else {rank: sums for rank in scales}
    uneven = {
        rank: [t for t, value in enumerate(each) if not _is_near(value, usual)]
        for rank, each in looked.items()
    }
    by_tokens: dict[tuple[int, ...], list[int]] = {}
    for rank, tokens in uneven.items():
        if tokens:
            by_tokens.setdefault((*tokens,), []).append(rank)
    for those, ranks in by_tokens.items():
        times = sorted({round(looked[ranks[0]][token] / usual, 4) for token in those})
        how = f"{times[0]:g}" if len(times) == 1 else f"{times[0]:g} to {times[-1]:g}"
        said = f"the gradient of {tokens_phrase(spec, those)} is {how} times what others get"
        yield fault(ranks, those, said)
    if not by_tokens:
        yield from _scale_faults(spec, usual, stage, reduction, scales=scales, is_whole=is_whole)


def _scale_faults(
    spec: TokenSpec,
    factor: float,
    stage: str,
    reduction: str,
    *,
    scales: Scales,
    is_whole: bool,
) -> Iterator[TokenFault]:
    num_ranks = len(scales)
    wanted = _wanted(reduction, num_ranks, is_whole=is_whole)
    if wanted is None:
        if _is_near(factor, 1) or num_ranks == 1:
            return
        grade = Grade.NOTE
        said = f"gradients come back {_times(factor, num_ranks)}; {_rights(factor, num_ranks)}"
    elif _is_near(factor, wanted):
        return
    else:
        grade = Grade.PROVEN
        what = {"none": "are not reduced"}.get(reduction, f"are reduced by their {reduction}")
        where = "each rank gets all of them" if is_whole else "each comes to one rank"
        said = (
            f"gradients come back {_times(factor, num_ranks)} instead of "
            f"{_times(wanted, num_ranks)}: {where}, and parameters' gradients {what} over these "
            "ranks"
        )
    yield TokenFault(
        kind=FaultKind.GRADIENT,
        stage=stage,
        ranks=tuple(scales),
        tokens=tuple(range(spec.num_tokens)),
        said=said,
        grade=grade,
    )


def _wanted(reduction: str, num_ranks: int, *, is_whole: bool) -> float | None:
    """Return by what each gradient should be multiplied; None if that is not told."""
    if not reduction:
        return None
    if is_whole:
        return 1 / num_ranks if reduction == "sum" else 1.0
    return float(num_ranks) if reduction == "mean" else 1.0


def _rights(factor: float, num_ranks: int) -> str:
    if _is_near(factor, num_ranks):
        return "right if parameters' gradients are averaged over these ranks, wrong if summed"
    if _is_near(factor * num_ranks, 1):
        return "right if parameters' gradients are summed over these ranks, wrong if averaged"
    return "say by `reduction` what the program does to gradients over these ranks"


def _times(factor: float, num_ranks: int) -> str:
    if _is_near(factor, 1):
        return "as they are"
    if _is_near(factor, num_ranks):
        return f"{num_ranks} times as large (once for each rank)"
    if _is_near(factor * num_ranks, 1):
        return f"divided by {num_ranks} (the number of ranks)"
    return f"{factor:g} times as large"


def _factor(spec: TokenSpec, scales: Scales) -> float:
    """Return by what all gradients are multiplied, 0 if they are not alike."""
    if any(len(each) != spec.num_tokens for each in scales.values()):
        return 0.0
    sums = _sums(scales)
    alike = all(_is_near(value, sums[0]) for value in sums)
    return sums[0] if alike and not math.isnan(sums[0]) else 0.0


def _sums(scales: Scales) -> list[float]:
    return [sum(each) for each in zip(*scales.values(), strict=True)]


def _is_whole(scales: Scales) -> bool:
    """Say whether every rank gets the gradients of all tokens."""
    return len(scales) > 1 and all(value != 0 for each in scales.values() for value in each)


def _usual(values: Iterator[float] | Sequence[float]) -> float:
    """Return the most frequent value, of several the one nearest to 1."""
    counts = Counter(round(value, 4) for value in values)
    return max(counts, key=lambda value: (counts[value], -abs(value - 1)))


def _is_near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _ROOM * abs(wanted)
