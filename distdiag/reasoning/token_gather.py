"""Whether a gather returns each token once, in its order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.reasoning.token_orders import order_phrase
from distdiag.reasoning.token_places import ByRank, counts_of, rows, shape_fault, spoilt
from distdiag.reasoning.token_split import moved_ranks
from distdiag.sequence_event import TokenPassport

_Wrong = tuple[FaultKind, tuple[int, ...], str]


def gather_faults(by_rank: ByRank, split: Sequence[TokenFault]) -> Iterator[TokenFault]:
    """Yield what the faults of the split do not explain of the gathered sequence."""
    if not any(one.gathered_shape for one in by_rank.values()):
        return  # nothing gathers
    if any(fault.kind in (FaultKind.WRONG_DIM, FaultKind.MIXED) for fault in split):
        return
    shape = shape_fault(by_rank, "gather")
    found = [shape] if shape is not None else list(spoilt(by_rank, "gather"))
    if found:
        is_known = any(fault.kind is FaultKind.FOREIGN for fault in split)
        yield from () if is_known else found
        return
    known = {token for fault in split for token in fault.tokens}
    ranks: dict[_Wrong, list[int]] = {}
    for rank, one in by_rank.items():
        for wrong in (*_wrong_counts(one, known), *_wrong_order(one, len(by_rank))):
            ranks.setdefault(wrong, []).append(rank)
    for (kind, tokens, said), those in ranks.items():
        moved = moved_ranks(by_rank) if kind is FaultKind.PERMUTED else None
        if moved is None:
            yield TokenFault(
                kind=kind, stage="gather", ranks=tuple(those), tokens=tokens, said=said
            )
            continue
        yield TokenFault(
            kind=FaultKind.OTHER_PART,
            stage="split",
            ranks=moved[0],
            tokens=tokens,
            said=f"{said}; {moved[1]}",
        )


def _wrong_counts(one: TokenPassport, known: Collection[int]) -> Iterator[_Wrong]:
    spec = one.spec
    lost, twice = counts_of(one.gathered, spec)
    for kind, tokens, what in (
        (FaultKind.LOST, lost, "went missing in the gathered sequence"),
        (FaultKind.DUPLICATED, twice, "came several times in the gathered sequence"),
    ):
        new = tuple(token for token in tokens if token not in known)
        if new:
            yield kind, new, f"{tokens_phrase(spec, new)} {what}"
    extra = len(one.gathered) // spec.batch - spec.length
    if extra > 0 and not lost and not twice:
        said = f"padding stays in each gathered row: {spec.length + extra} places for "
        yield FaultKind.PADDED, (), f"{said}{spec.length} tokens"


def _wrong_order(one: TokenPassport, num_ranks: int) -> Iterator[_Wrong]:
    spec = one.spec
    orders = [list(dict.fromkeys(row)) for row in rows(one, "gather")]
    strangers = [
        token for row, order in enumerate(orders) for token in order if token // spec.length != row
    ]
    if strangers:
        tokens = tuple(sorted(set(strangers)))
        said = f"{tokens_phrase(spec, tokens)} came in another row than their own"
        yield FaultKind.PERMUTED, tokens, said
        return
    wanted = [sorted(order) for order in orders]
    moved = [
        token
        for order, right in zip(orders, wanted, strict=True)
        for token, due in zip(order, right, strict=True)
        if token != due
    ]
    if not moved:
        return
    order, right = next(
        (order, right) for order, right in zip(orders, wanted, strict=True) if order != right
    )
    how = order_phrase([right.index(token) for token in order], num_ranks)
    tokens = tuple(sorted(moved))
    yield FaultKind.PERMUTED, tokens, f"{tokens_phrase(spec, tokens)} came {how}"
