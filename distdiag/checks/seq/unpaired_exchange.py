"""SEQ010: what attention made of gathered sequences is not brought back to the ranks' own parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import AttentionUse
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import SequenceView

_FEWEST: Final = 2


class UnpairedExchange(Check[SequenceView]):
    """What attention made of whole sequences is not brought back to the ranks that hold the parts.

    ## What it detects
    A module exchanges query, key and value by all-to-all, so that each rank has some heads of the
    whole sequence, computes attention, and exchanges nothing afterwards, in several passes. Or some
    ranks do so after as many calls as others do before.

    ## Why it matters
    The output of some heads for all tokens has as many elements as that of all heads for some
    tokens: it can be reshaped to what follows, without an error, and mixes tokens and heads.

    ## Example
    `q, k, v = [to_heads(x) for x in (q, k, v)]`, attention, and then `out.reshape(b, s, hidden)`
    without `to_tokens(out)`.

    ## How to fix
    Exchange the output back, heads for tokens, before the output projection.

    ## References
    - `deepspeed.sequence.layer.DistributedAttention`
    """

    code = "SEQ010"
    name = "unpaired-exchange"
    severity = Severity.ERROR

    why = "The second all-to-all of the pair is missing in this layer."
    fix = "Exchange the output of attention: scatter its tokens and gather its heads."
    fix_changes = "What the layer returns for each token."
    fix_leaves = "Weights that were trained on mixed outputs."
    disproof = "Something after attention brings all heads of this rank's tokens together."

    def check(self, view: SequenceView) -> Iterator[Finding]:
        """Look for layers that never bring anything back."""
        if view.how != "all_to_all" or len(view.passes) < _FEWEST:
            return
        missing: dict[int, AttentionUse] = {}
        for rank in view.ranks:
            lines: dict[object, set[bool]] = {}
            for by_rank in view.passes:
                for use in by_rank[rank].uses:
                    lines.setdefault(use.site, set()).add(use.is_returned)
                    if not use.is_returned:
                        missing.setdefault(rank, use)
            if rank in missing and lines[missing[rank].site] != {False}:
                del missing[rank]
        if not missing:
            return
        ranks = RankSet(missing)
        location = user_location(missing[min(ranks)].site.frames)
        where = "" if ranks == view.ranks else f", while {_others(view.ranks, ranks)} do"
        yield self.finding(
            f"{ranks.phrase()} exchange query, key or value by all-to-all before attention, and "
            f"do not exchange its output afterwards{where}",
            ranks=ranks,
            step=view.passes[-1][min(ranks)].step,
            location=location,
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{len(view.passes)} passes: {len(use.given)} all-to-alls before "
                    "attention at this line, none after it in the module; one was expected",
                    location=user_location(use.site.frames),
                )
                for rank, use in missing.items()
            ),
        )


def _others(ranks: RankSet, those: RankSet) -> str:
    return RankSet(rank for rank in ranks if rank not in those).phrase()
