"""SEQ010: what attention made of gathered sequences is not brought back to the ranks' own parts."""

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

    ## What you see
    The layer mixes tokens and heads without an error: some heads of all tokens have as many
    elements as all heads of some tokens, so a reshape hides it. The second all-to-all, from heads
    back to tokens, is missing after attention.

    ## Example
        q, k, v = (to_heads(x) for x in (q, k, v))
        out = attention(q, k, v)
        # wrong
        out = out.reshape(batch, part_length, hidden)
        # right
        out = to_tokens(out).reshape(batch, part_length, hidden)

    ## How to fix
    Exchange the output of attention back with a second all-to-all (`dist.all_to_all_single`) before
    the output projection.

    Changes: What the layer returns for each token.

    Leaves: Weights that were trained on mixed outputs.

    ## When it is not a defect
    Other code after attention brings all heads of this rank's tokens together.

    If so, add `ignore = ["SEQ010"]` to `distdiag.toml`.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/sequence/layer.py
    """

    code = "SEQ010"
    name = "unpaired-exchange"
    severity = Severity.ERROR

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
                    "attention at this line, none after attention in the module; one was expected",
                    location=user_location(use.site.frames),
                )
                for rank, use in missing.items()
            ),
        )


def _others(ranks: RankSet, those: RankSet) -> str:
    return RankSet(rank for rank in ranks if rank not in those).phrase()
