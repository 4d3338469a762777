"""What became of numbered tokens, and the checks that report it."""

from collections.abc import Iterator
from typing import ClassVar, Final

import msgspec

from distdiag.checks.base import Check
from distdiag.checks.seq.token_fault import FaultKind, TokenFault, tokens_phrase
from distdiag.checks.seq.token_gradients import (
    attention_gradient_faults,
    gradient_faults,
    softmax_gradient_faults,
)
from distdiag.checks.seq.token_order import ByRank, gather_faults, split_faults
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import FOREIGN, MIXED, PAD, Context, TokenSpec, TokenTrace
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.alignment import TokenTraceView

# Over which tokens each token attended, and over which it should have.


def context_faults(by_rank: ByRank) -> Iterator[TokenFault]:
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


def _wrong(one: TokenTrace) -> Iterator[tuple[tuple[int, ...], str]]:
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
        said.append("gets values of a different head or row")
    where = f" (in {'head' if len(context.heads) == 1 else 'heads'} {RankSet(context.heads)})"
    return ", ".join(said) + (where if said and context.heads else "")


def faults_of(by_rank: ByRank) -> tuple[TokenFault, ...]:
    """Return what is wrong with numbered tokens, as all ranks of the group saw them."""
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


_MOST_SHOWN: Final = 64
_SIGNS: Final = {PAD: "pad", MIXED: "mixed", FOREIGN: "?"}
_CONFIDENCE: Final = {Grade.PROVEN: 0.97, Grade.LIKELY: 0.8, Grade.NOTE: 0.5}


class TokenTraceCheck(Check[TokenTraceView]):
    """Report faults of these kinds in what all ranks of a group saw of the same tokens."""

    kinds: ClassVar[tuple[FaultKind, ...]]

    def check(self, view: TokenTraceView) -> Iterator[Finding]:
        """Yield a finding for each fault."""
        for fault in faults_of(view.by_rank):
            if fault.kind in self.kinds:
                yield self._finding(fault, view.by_rank)

    def _finding(self, fault: TokenFault, by_rank: ByRank) -> Finding:
        ranks = RankSet(fault.ranks)
        one = by_rank[min(ranks)]
        return self.finding(
            f"{fault.stage} of {one.name} on {ranks.phrase()}: {fault.said}",
            ranks=ranks,
            step=one.step,
            location=_location(fault, one),
            subjects=(one.name, fault.stage, fault.kind.value),
            severity=Severity.WARNING if fault.grade is Grade.LIKELY else None,
            grade=fault.grade,
            confidence=_CONFIDENCE[fault.grade],
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=_evidence_of(fault, each),
                    location=_location(fault, each),
                    values={"dtype": each.spec.dtype, "dim": each.spec.dim},
                )
                for rank, each in by_rank.items()
            ),
        )


def _location(fault: TokenFault, one: TokenTrace) -> Location | None:
    stage = "gather" if fault.stage == "gradient" else fault.stage.removesuffix(" gradient")
    frame = dict(one.functions).get(stage)
    own = user_location((frame,)) if frame is not None else None
    return own or user_location(one.site.frames)


def _evidence_of(fault: TokenFault, one: TokenTrace) -> str:
    if one.error:
        return f"{one.stage} raised {one.error}"
    if fault.stage in ("gradient", "attention gradient"):
        if fault.kind is FaultKind.ATTENTION_GRADIENT:
            return "gradients of queries | keys | values that reach this rank: " + " | ".join(
                map(_listed, one.gradients)
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
