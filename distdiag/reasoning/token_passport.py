"""Reads off what became of numbered tokens: which ones were lost, doubled, moved or mixed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from distdiag.finding import Grade
from distdiag.reasoning.softmax_gradients import softmax_gradient_faults
from distdiag.reasoning.token_contexts import context_faults
from distdiag.reasoning.token_fault import FaultKind, TokenFault
from distdiag.reasoning.token_gather import gather_faults
from distdiag.reasoning.token_gradients import attention_gradient_faults, gradient_faults
from distdiag.reasoning.token_places import ByRank
from distdiag.reasoning.token_split import split_faults


def faults_of(by_rank: ByRank) -> tuple[TokenFault, ...]:
    """Return what is wrong with one passage of tokens, as all ranks of the group saw it."""
    faults = _faults(by_rank)
    if all(one.is_form_sure for one in by_rank.values()):
        return faults
    return tuple(map(_doubted, faults))


def _doubted(fault: TokenFault) -> TokenFault:
    said = f"{fault.said}; it is right if the program gives it heads before tokens"
    return msgspec.structs.replace(fault, said=said, grade=Grade.NOTE)


def _faults(by_rank: ByRank) -> tuple[TokenFault, ...]:
    raised = tuple(_raised(by_rank))
    if raised:
        return raised
    first = next(iter(by_rank.values()))
    if not set(first.members) <= by_rank.keys():
        return ()
    by_rank = {rank: by_rank[rank] for rank in first.members}
    split = list(split_faults(by_rank))
    found = [*split, *gather_faults(by_rank, split), *context_faults(by_rank)]
    if not found:
        # Behind tokens that went astray gradients are wrong as a consequence.
        found += gradient_faults(by_rank)
        found += attention_gradient_faults(by_rank)
    if not found:
        found += softmax_gradient_faults(by_rank)
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
