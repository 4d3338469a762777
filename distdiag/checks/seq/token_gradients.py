"""Whether tokens, queries, keys and values get the gradients that they should."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from distdiag.checks.seq.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.events.sequences import TokenSpec, TokenTrace
from distdiag.findings.finding import Grade

_ROOM = 0.02

Scales = Mapping[int, Sequence[float]]


def gradient_faults(by_rank: Mapping[int, TokenTrace]) -> Iterator[TokenFault]:
    """Yield what is wrong with the gradients that came back through split and gather."""
    traces = list(by_rank.values())
    spec = traces[0].spec
    if any(len(one.scales) != spec.num_tokens for one in traces):
        return
    scales = {rank: one.scales for rank, one in by_rank.items()}
    yield from _faults(spec, scales)


def attention_gradient_faults(by_rank: Mapping[int, TokenTrace]) -> Iterator[TokenFault]:
    """Yield which values get another gradient than those that attend to them say.

    What split and gather do to gradients is known, and left out.
    """
    traces = list(by_rank.values())
    spec = traces[0].spec
    before = common_scale(by_rank)
    if not before or any(len(one.attended) != spec.num_tokens for one in traces):
        return
    counts = [spec.num_attending(position) for position in range(spec.length)] * spec.batch
    sums = _sums({rank: one.attended for rank, one in by_rank.items()})
    times = [value / before / count for value, count in zip(sums, counts, strict=True)]
    wrong = [token for token, value in enumerate(times) if not _is_near(value, 1)]
    if wrong:
        found = sorted({round(times[token], 4) for token in wrong})
        how = "another" if math.isnan(sum(found)) else f"{_range(found)} times the"
        yield TokenFault(
            kind=FaultKind.GRADIENT,
            stage="attention gradient",
            ranks=tuple(by_rank),
            tokens=tuple(wrong),
            said=f"the values of {tokens_phrase(spec, wrong)} get {how} gradient that they should",
        )


def _range(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"


def _faults(spec: TokenSpec, scales: Scales) -> Iterator[TokenFault]:
    mixed = list(_mixed(spec, scales))
    if mixed:
        yield from mixed
        return
    sums = _sums(scales)
    lost = [token for token, value in enumerate(sums) if value == 0]
    if lost:
        said = f"no gradient comes back to {tokens_phrase(spec, lost)} on any rank"
        yield _fault([*scales], lost, said)
        return
    is_whole = _is_whole(scales)
    looked = scales if is_whole else {rank: sums for rank in scales}
    usual = _usual(chain.from_iterable(looked.values()))
    uneven = list(_uneven(spec, scales, looked, usual))
    yield from uneven or _scale_faults(spec, usual, tuple(scales), is_whole=is_whole)


def _fault(
    ranks: Sequence[int], tokens: Sequence[int], said: str, grade: Grade = Grade.PROVEN
) -> TokenFault:
    return TokenFault(
        kind=FaultKind.GRADIENT,
        stage="gradient",
        ranks=tuple(ranks),
        tokens=tuple(tokens),
        said=said,
        grade=grade,
    )


def _mixed(spec: TokenSpec, scales: Scales) -> Iterator[TokenFault]:
    for rank, each in scales.items():
        tokens = [token for token, value in enumerate(each) if math.isnan(value)]
        if tokens:
            said = f"the gradient of {tokens_phrase(spec, tokens)} is not that of its output"
            yield _fault([rank], tokens, said)


def _uneven(spec: TokenSpec, scales: Scales, looked: Scales, usual: float) -> Iterator[TokenFault]:
    """Yield tokens whose gradients are multiplied otherwise than those of the others."""
    by_tokens: dict[tuple[int, ...], list[int]] = {}
    for rank, each in looked.items():
        tokens = tuple(t for t, value in enumerate(each) if not _is_near(value, usual))
        if any(scales[rank][token] != 0 for token in tokens):
            by_tokens.setdefault(tokens, []).append(rank)
    for tokens, ranks in by_tokens.items():
        times = sorted({round(looked[ranks[0]][token] / usual, 4) for token in tokens})
        said = f"the gradient of {tokens_phrase(spec, tokens)} is {_range(times)} times that of "
        yield _fault(ranks, tokens, said + "others")


def _scale_faults(
    spec: TokenSpec, factor: float, ranks: tuple[int, ...], *, is_whole: bool
) -> Iterator[TokenFault]:
    """Yield a common factor that does not fit what the program does to gradients."""
    num_ranks, tokens = len(ranks), range(spec.num_tokens)
    came = f"gradients come back {_times(factor, num_ranks)}"
    wanted = _wanted(spec.reduction, num_ranks, is_whole=is_whole)
    if wanted is None:
        if not _is_near(factor, 1):
            yield _fault(ranks, tokens, f"{came}; {_rights(factor, num_ranks)}", Grade.NOTE)
    elif not _is_near(factor, wanted):
        is_reduced = spec.reduction != "none"
        what = f"are reduced by their {spec.reduction}" if is_reduced else "are not reduced"
        where = "each rank gets all of them" if is_whole else "each comes to one rank"
        said = (
            f"{came} instead of {_times(wanted, num_ranks)}: {where}, and parameters' gradients "
            f"{what} over these ranks"
        )
        yield _fault(ranks, tokens, said)


def _wanted(reduction: str, num_ranks: int, *, is_whole: bool) -> float | None:
    """Return by what each gradient should be multiplied; None if that is not known."""
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


def common_scale(by_rank: Mapping[int, TokenTrace]) -> float:
    """Return by what split and gather multiply all gradients, 0 if the factors differ."""
    spec = next(iter(by_rank.values())).spec
    return _factor(spec, {rank: one.scales for rank, one in by_rank.items()})


def _factor(spec: TokenSpec, scales: Scales) -> float:
    """Return by what all gradients are multiplied, 0 if the factors differ."""
    if any(len(each) != spec.num_tokens for each in scales.values()):
        return 0.0
    sums = _sums(scales)
    equal = all(_is_near(value, sums[0]) for value in sums)
    return sums[0] if equal and not math.isnan(sums[0]) else 0.0


def _sums(scales: Scales) -> list[float]:
    return [sum(each) for each in zip(*scales.values(), strict=True)]


def _is_whole(scales: Scales) -> bool:
    """Say whether every rank gets the gradients of all tokens."""
    return len(scales) > 1 and all(value != 0 for each in scales.values() for value in each)


def _usual(values: Iterable[float]) -> float:
    """Return the most frequent value, of several the one nearest to 1."""
    counts = Counter(round(value, 4) for value in values)
    return max(counts, key=lambda value: (counts[value], -abs(value - 1)))


def _is_near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _ROOM * abs(wanted)


_NAMES: Final = ("queries", "keys", "values")
_ROOM_BY_DTYPE: Final[Mapping[str, float]] = {"bfloat16": 0.25, "float16": 0.04}
_LEAST_ROOM: Final = 4e-3


def softmax_gradient_faults(by_rank: Mapping[int, TokenTrace]) -> Iterator[TokenFault]:
    """Yield what differs, where the output of attention is right on all ranks.

    What split and gather do to gradients is known, and left out.
    """
    traces = list(by_rank.values())
    spec, due = traces[0].spec, traces[0].due_gradients
    before = common_scale(by_rank)
    if not before or not due or any(one.due_gradients != due for one in traces):
        return
    room = _ROOM_BY_DTYPE.get(spec.dtype, _LEAST_ROOM)
    wrong: dict[str, float] = {}
    tokens: set[int] = set()
    for number, name in enumerate(_NAMES):
        whole = [
            sum(each) / before
            for each in zip(*(one.gradients[number] for one in traces), strict=True)
        ]
        apart = [found - wanted for found, wanted in zip(whole, due[number], strict=True)]
        size = _size(due[number])
        if _size(apart) > room * size:
            wrong[name] = _size(apart) / size
            least = room * size / math.sqrt(len(apart))
            tokens.update(token for token, each in enumerate(apart) if abs(each) > least)
    if wrong:
        shares = ", ".join(
            f"that of {name} by {share:.2g} of itself" for name, share in wrong.items()
        )
        yield TokenFault(
            kind=FaultKind.ATTENTION_GRADIENT,
            stage="attention gradient",
            ranks=tuple(by_rank),
            tokens=tuple(sorted(tokens)),
            said="the output is that of plain attention over whole rows, the gradient is not: it "
            f"differs at {tokens_phrase(spec, sorted(tokens))}, {shares}",
        )


def _size(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))
