"""Reads off what became of numbered tokens: which ones were lost, doubled, moved or mixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from distdiag.finding import Grade
from distdiag.reasoning.token_contexts import context_faults
from distdiag.reasoning.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.reasoning.token_gradients import attention_gradient_faults, gradient_faults
from distdiag.reasoning.token_orders import best_layout, order_phrase, part_phrase
from distdiag.sequence_event import FOREIGN, MIXED, PAD, TokenPassport, TokenSpec

ByRank = Mapping[int, TokenPassport]


def faults_of(by_rank: ByRank) -> tuple[TokenFault, ...]:
    """Return what is wrong with one passage of tokens, as all ranks of the group saw it."""
    raised = tuple(_raised(by_rank))
    if raised:
        return raised
    first = next(iter(by_rank.values()))
    if not set(first.members) <= by_rank.keys():
        return ()
    by_rank = {rank: by_rank[rank] for rank in first.members}
    split = list(_split_faults(by_rank))
    found = split + list(_gather_faults(by_rank, split))
    contexts = list(context_faults(by_rank))
    found += contexts
    if not found:
        # Behind tokens that went astray gradients are wrong as a consequence.
        found += gradient_faults(by_rank)
        found += attention_gradient_faults(by_rank)
    return tuple(found)


def _raised(by_rank: ByRank) -> Iterator[TokenFault]:
    errors: dict[tuple[str, str], list[int]] = {}
    for rank, one in by_rank.items():
        if one.error:
            errors.setdefault((one.stage, one.error), []).append(rank)
    is_everywhere = all(one.error for one in by_rank.values())
    for (stage, error), ranks in errors.items():
        spec = by_rank[ranks[0]].spec
        yield TokenFault(
            kind=FaultKind.RAISED,
            stage=stage,
            ranks=tuple(ranks),
            tokens=(),
            said=f"for {list(spec.shape)} along dim {spec.dim} it raised {error}",
            # Raised everywhere, it may be that the form does not suit the function.
            grade=Grade.NOTE if is_everywhere else Grade.LIKELY,
        )


def _other_dims(one: TokenPassport, shape: tuple[int, ...]) -> list[int]:
    """Return the dimensions but that of the sequence in which a shape is not the full one."""
    whole = one.spec.shape
    if len(shape) != len(whole):
        return list(range(len(whole)))
    return [i for i, size in enumerate(shape) if size != whole[i] and i != one.spec.dim]


def _shape_fault(by_rank: ByRank, stage: str) -> TokenFault | None:
    wrong = []
    for rank, one in by_rank.items():
        shape = one.part_shape if stage == "split" else one.gathered_shape
        if _other_dims(one, shape):
            wrong.append(rank)
    if not wrong:
        return None
    one = by_rank[wrong[0]]
    spec = one.spec
    shape, seen = (
        (one.part_shape, one.parts) if stage == "split" else (one.gathered_shape, one.gathered)
    )
    dims = " and ".join(map(str, _other_dims(one, shape)))
    done = "cuts" if stage == "split" else "joins"
    intact = {token for token in seen if token >= 0} if stage == "gather" else set()
    tokens = tuple(token for token in range(spec.num_tokens) if token not in intact)
    return TokenFault(
        kind=FaultKind.WRONG_DIM,
        stage=stage,
        ranks=tuple(wrong),
        tokens=tokens or tuple(range(spec.num_tokens)),
        said=f"it {done} dim {dims} instead of dim {spec.dim}: the whole is {list(spec.shape)}, "
        f"it returns {list(shape)}",
    )


def _spoilt(by_rank: ByRank, stage: str) -> Iterator[TokenFault]:
    """Yield places that hold what is no token."""
    for mark, kind, what in (
        (FOREIGN, FaultKind.FOREIGN, "values that belong to no token"),
        (MIXED, FaultKind.MIXED, "channels of several tokens, or in another order"),
    ):
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, one in by_rank.items():
            seen = one.parts if stage == "split" else one.gathered
            places = _numbered(one.spec, seen, mark)
            if places:
                ranks.setdefault(places, []).append(rank)
        for places, those in ranks.items():
            spec = by_rank[those[0]].spec
            said = f"places {_places(spec, places)} hold {what}"
            yield TokenFault(kind=kind, stage=stage, ranks=tuple(those), tokens=places, said=said)


def _numbered(spec: TokenSpec, seen: tuple[int, ...], mark: int) -> tuple[int, ...]:
    """Return where a mark stands, numbered as the tokens of whole rows are."""
    size = len(seen) // spec.batch
    return tuple(
        row * spec.length + min(place, spec.length - 1)
        for row in range(spec.batch)
        for place in range(size)
        if seen[row * size + place] == mark
    )


def _places(spec: TokenSpec, places: tuple[int, ...]) -> str:
    return tokens_phrase(spec, dict.fromkeys(places)).replace("tokens ", "").replace("token ", "")


def _rows(one: TokenPassport, seen: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the tokens of each row, by their numbers."""
    size = len(seen) // one.spec.batch
    return [seen[row * size : (row + 1) * size] for row in range(one.spec.batch)]


def _split_faults(by_rank: ByRank) -> Iterator[TokenFault]:
    shape = _shape_fault(by_rank, "split")
    if shape is not None:
        yield shape
        return
    spoilt = list(_spoilt(by_rank, "split"))
    if spoilt:
        yield from spoilt
        return
    spec = next(iter(by_rank.values())).spec
    held = {rank: [token for token in one.parts if token != PAD] for rank, one in by_rank.items()}
    counts = Counter(chain.from_iterable(held.values()))
    lost = tuple(token for token in range(spec.num_tokens) if not counts[token])
    twice = tuple(token for token in range(spec.num_tokens) if counts[token] > 1)
    if not lost and not twice:
        return
    culprits, how = _culprits(by_rank)
    if len(by_rank) > 1 and all(n == len(by_rank) for n in counts.values()) and not lost:
        how = "every rank has the whole sequence: nothing is split"
    for kind, tokens, what in (
        (FaultKind.LOST, lost, "come to no rank"),
        (FaultKind.DUPLICATED, twice, "come to several ranks, or to one several times"),
    ):
        if tokens:
            said = f"{tokens_phrase(spec, tokens)} {what}; {how}"
            yield TokenFault(kind=kind, stage="split", ranks=culprits, tokens=tokens, said=said)


def _culprits(by_rank: ByRank) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose parts do not fit the layout that most have, and what the first has."""
    ranks = tuple(by_rank)
    spec = by_rank[ranks[0]].spec
    parts = tuple(
        tuple(token for token in _rows(one, one.parts)[0] if token != PAD)
        for one in by_rank.values()
    )
    _, wanted, fitting = best_layout(parts, spec.length)
    wrong = [index for index in range(len(ranks)) if index not in fitting]
    if not wrong:
        return ranks, "the rows are not split alike"
    index = wrong[0]
    how = f"rank {ranks[index]}: {part_phrase(parts[index], index, wanted, ranks)}"
    return tuple(ranks[i] for i in wrong), how


def _gather_faults(by_rank: ByRank, split: list[TokenFault]) -> Iterator[TokenFault]:
    if any(fault.kind is FaultKind.WRONG_DIM for fault in split):
        return
    shape = _shape_fault(by_rank, "gather")
    if shape is not None:
        yield shape
        return
    spoilt = list(_spoilt(by_rank, "gather"))
    if spoilt:
        if not any(fault.kind in (FaultKind.MIXED, FaultKind.FOREIGN) for fault in split):
            yield from spoilt
        return
    known = {
        kind: {token for fault in split if fault.kind is kind for token in fault.tokens}
        for kind in (FaultKind.LOST, FaultKind.DUPLICATED)
    }
    ranks: dict[tuple[FaultKind, tuple[int, ...], str], list[int]] = {}
    for rank, one in by_rank.items():
        for kind, tokens, said in _gathered_wrong(by_rank, one, known):
            ranks.setdefault((kind, tokens, said), []).append(rank)
    for (kind, tokens, said), those in ranks.items():
        stage = "gather"
        culprits = tuple(those)
        if kind is FaultKind.PERMUTED:
            moved = _moved(by_rank)
            if moved is not None:
                kind, stage, culprits = FaultKind.OTHER_PART, "split", moved[0]
                said = f"{said}; {moved[1]}"
        yield TokenFault(kind=kind, stage=stage, ranks=culprits, tokens=tokens, said=said)


def _gathered_wrong(
    by_rank: ByRank, one: TokenPassport, known: Mapping[FaultKind, set[int]]
) -> Iterator[tuple[FaultKind, tuple[int, ...], str]]:
    spec = one.spec
    counts = Counter(one.gathered)
    lost = tuple(t for t in range(spec.num_tokens) if not counts[t])
    twice = tuple(t for t in range(spec.num_tokens) if counts[t] > 1)
    new_lost = tuple(token for token in lost if token not in known[FaultKind.LOST])
    new_twice = tuple(token for token in twice if token not in known[FaultKind.DUPLICATED])
    if new_lost:
        said = f"{tokens_phrase(spec, new_lost)} are missing from the gathered sequence"
        yield FaultKind.LOST, new_lost, said
    if new_twice:
        said = f"{tokens_phrase(spec, new_twice)} are in the gathered sequence several times"
        yield FaultKind.DUPLICATED, new_twice, said
    if counts[PAD] and not lost:
        number = counts[PAD] // spec.batch
        said = f"{number} places of padding stay in each gathered row of {spec.length} tokens"
        yield FaultKind.PADDED, (), said
    orders = [list(dict.fromkeys(t for t in row if t >= 0)) for row in _rows(one, one.gathered)]
    wanted = [sorted(row) for row in orders]
    if orders == wanted and [t for row in orders for t in row] == sorted(
        t for t in counts if t >= 0
    ):
        return
    wrong = tuple(
        sorted(
            t
            for o, w in zip(orders, wanted, strict=True)
            for t, u in zip(o, w, strict=True)
            if t != u
        )
    )
    row = next((o for o, w in zip(orders, wanted, strict=True) if o != w), None)
    if row is None or any(token // spec.length != row[0] // spec.length for token in row):
        said = "the gathered rows hold tokens of other rows"
        yield FaultKind.PERMUTED, wrong or tuple(sorted(counts)), said
        return
    ranking = {token: place for place, token in enumerate(sorted(row))}
    how = order_phrase([ranking[token] for token in row], len(by_rank))
    if len(wrong) == spec.num_tokens:
        yield FaultKind.PERMUTED, wrong, f"all tokens are gathered {how}"
    else:
        yield (
            FaultKind.PERMUTED,
            wrong,
            f"tokens are gathered {how}; moved are {tokens_phrase(spec, wrong)}",
        )


def _moved(by_rank: ByRank) -> tuple[tuple[int, ...], str] | None:
    """Return the ranks that have the parts of others, if gathering only joins what they have."""
    parts = [_rows(one, one.parts)[0] for one in by_rank.values()]
    joined = [token for token in chain.from_iterable(parts) if token != PAD]
    if any(
        [token for token in _rows(one, one.gathered)[0] if token != PAD] != joined
        for one in by_rank.values()
    ):
        return None
    spec = next(iter(by_rank.values())).spec
    clean = tuple(tuple(token for token in part if token != PAD) for part in parts)
    name, wanted, fitting = best_layout(clean, spec.length)
    ranks = tuple(by_rank)
    if (
        set(clean) != set(wanted)
        or len(fitting) == len(ranks)
        or name not in ("contiguous", "even")
    ):
        return None
    wrong = [index for index in range(len(ranks)) if index not in fitting]
    index = wrong[0]
    phrase = part_phrase(clean[index], index, wanted, ranks)
    return tuple(ranks[i] for i in wrong), f"rank {ranks[index]}: {phrase}"
