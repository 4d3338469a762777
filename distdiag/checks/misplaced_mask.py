"""SEQ013: what hides tokens from attention does not belong to the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.event import Event
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.masks import PADDING, fault_of, is_right
from distdiag.reasoning.sequences import is_one_text, members_of, phrase_of
from distdiag.sequence_use_event import SequenceUse
from distdiag.sequence_view import SequenceView

_FEWEST: Final = 2


class MisplacedMask(Check):
    """What hides tokens from attention does not belong to the parts of a sequence that ranks hold.

    ## What it detects
    In several passes, and on all ranks that share a sequence: the model is given token ids with a
    mask that leaves padding and hides other tokens, where that of the batch hides all padding and
    nothing else; or attention over the whole sequence gets this rank's part of the mask once for
    each part; or gathered keys are attended to with a causal mask that places the queries of each
    rank at the same end of them; or the cumulative lengths of packed rows end at those of a part,
    and attention has the whole, or the other way round. Masks that hide nothing are left out.

    ## Why it matters
    Attention sees padding, and not all tokens; or the future, or only the first part. Shapes fit,
    and the loss falls.

    ## Example
    `mask[:, :length]` in place of `mask[:, rank * length : (rank + 1) * length]`; or
    `scaled_dot_product_attention(q, gathered_k, gathered_v, is_causal=True)`.

    ## How to fix
    Split the mask as the ids are split, and give attention the mask, or the lengths, of the tokens
    that it gets after the exchange.

    ## References
    - `torch.nn.functional.scaled_dot_product_attention`
    - `deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter`
    """

    code = "SEQ013"
    name = "misplaced-mask"
    severity = Severity.WARNING
    needs = (SequenceUse,)

    why = "The mask is made or split apart from the tokens, and its form fits all the same."
    fix = "Split the mask as the token ids are split, and exchange it where keys are exchanged."
    fix_changes = "Which tokens attention sees, and so the loss."
    fix_leaves = "The split of the tokens, and the exchanges around attention."
    disproof = (
        "The mask that attention gets, printed on each rank, hides the tokens that it should."
    )
    absent = "no mask, causality or lengths that hide tokens were seen at shared attention"

    def concerns(self, event: Event) -> bool:
        """Look for masks, causality and lengths beside attention."""
        return isinstance(event, SequenceUse) and any(u.mask or u.padding for u in event.uses)

    def check_sequences(self, view: SequenceView) -> Iterator[Finding]:
        """Compare what hides tokens in the first layer of each pass."""
        for members in members_of(view):
            faults = [(each, fault_of(each, members)) for each in view.passes]
            found = [(each, fault) for each, fault in faults if fault is not None]
            kinds = {fault.kind for _, fault in found}
            if len(kinds) != 1 or len(found) < _FEWEST:
                continue
            if kinds == {PADDING} and any(is_right(each, members) for each in view.passes):
                continue
            by_rank, fault = found[-1]
            is_sure = fault.is_certain or is_one_text(view, members)
            first = by_rank[members[0]]
            location = user_location(first.uses[0].site.frames)
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)} around "
                f"attention, but {fault.what}, in {len(found)} of {len(view.passes)} passes; "
                f"expected: {fault.expected}",
                ranks=RankSet(members),
                step=first.step,
                location=location,
                grade=Grade.LIKELY if is_sure else Grade.NOTE,
                confidence=0.9 if is_sure else 0.4,
                fix=fault.fix,
                evidence=tuple(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"pass {first.number}: {seen}",
                        location=location,
                    )
                    for rank, seen in zip(members, fault.seen, strict=True)
                ),
            )
