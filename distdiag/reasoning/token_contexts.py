"""Over which tokens each token attended, and over which it should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distdiag.ranks import RankSet
from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.sequence_event import Context, TokenPassport, TokenSpec


def context_faults(by_rank: Mapping[int, TokenPassport]) -> Iterator[TokenFault]:
    """Yield where tokens attended over others than they should; equal faults of ranks are one."""
    ranks: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for rank, one in by_rank.items():
        if one.attention_shape and one.attention_shape != one.part_shape:
            said = f"attention returns {list(one.attention_shape)} for {list(one.part_shape)}"
            ranks.setdefault(((), said), []).append(rank)
            continue
        for tokens, said in _wrong(one):
            ranks.setdefault((tokens, said), []).append(rank)
    for (tokens, said), those in ranks.items():
        yield TokenFault(
            kind=FaultKind.CONTEXT,
            stage="attention",
            ranks=tuple(those),
            tokens=tokens,
            said=said,
        )


def _wrong(one: TokenPassport) -> Iterator[tuple[tuple[int, ...], str]]:
    spec = one.spec
    by_text: dict[str, list[int]] = {}
    for context in one.contexts:
        text = _problem(spec, context)
        if text:
            by_text.setdefault(text, []).append(context.token)
    if not by_text:
        return
    # One sentence for each rank: the first token with its numbers, and which others are wrong.
    wrong = tuple(sorted({token for tokens in by_text.values() for token in tokens}))
    text = next(text for text, tokens in by_text.items() if wrong[0] in tokens)
    first = tokens_phrase(spec, [wrong[0]])
    others = len(wrong) - 1
    more = f"; wrong are {tokens_phrase(spec, wrong)}" if others else ""
    yield wrong, f"{first} {text}{more}"


def _problem(spec: TokenSpec, context: Context) -> str:
    wanted = spec.context(context.token % spec.length)
    times = {place: n for begin, end, n in context.runs for place in range(begin, end)}
    missing = RankSet(set(wanted) - times.keys())
    extra = RankSet(times.keys() - set(wanted))
    again = RankSet(place for place, count in times.items() if count > 1)
    said = []
    if missing:
        said.append(f"does not attend to {missing}")
    if extra:
        said.append(f"attends to {extra}, which it must not see")
    if again:
        said.append(f"attends to {again} more than once")
    if context.padding:
        said.append(f"gives {context.padding:.0%} of its attention to padding")
    if context.is_mixed:
        said.append("gets what belongs to another head or row")
    where = f" (in {'head' if len(context.heads) == 1 else 'heads'} {RankSet(context.heads)})"
    return ", ".join(said) + (where if said and context.heads else "")
