"""MOE003: ranks send and expect different numbers of tokens."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.moe.exchanges import evidence_of, layer_of, unfit_rows
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import call_location, call_phrase, sizes_phrase
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.invariants import ranks_in
from distdiag.views.routing import Exchange, RoundTrip, UnfitExchange

_MOST_PAIRS = 3


class ExchangeMismatch(Check[UnfitExchange | RoundTrip]):
    """Ranks send and expect different numbers of tokens in an all-to-all.

    ## What you see
    The all-to-all hangs, aborts, or mixes rows of different tokens, so outputs of experts are lost
    or added to wrong tokens. The number of rows that one rank sends and the number that the other
    rank expects come from different counts.

    ## Example
        there = all_to_all(rows, send_splits, recv_splits)
        # wrong: the splits of the way there
        back = all_to_all(experts(there), send_splits, recv_splits)
        # right
        back = all_to_all(experts(there), recv_splits, send_splits)

    ## How to fix
    Exchange the counts first (`dist.all_to_all_single(received_counts, sent_counts)`), compute both
    splits from them, and swap the two splits for the way back.

    Changes: Which rows each expert gets, and which come back.

    Leaves: How the tokens are spread over the experts.

    ## When it is not a defect
    The matrix of the input splits of all ranks is the transpose of the matrix of their output
    splits.

    If so, add `ignore = ["MOE003"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single
    """

    code = "MOE003"
    name = "exchange-mismatch"
    severity = Severity.ERROR

    def check(self, view: UnfitExchange | RoundTrip) -> Iterator[Finding]:
        """Compare what ranks send and expect, or the way there and the way back."""
        yield from (
            self._of_splits(view) if isinstance(view, UnfitExchange) else self._of_round_trip(view)
        )

    def _of_splits(self, view: UnfitExchange) -> Iterator[Finding]:
        """Name the pairs of ranks of which one sends more or fewer rows than the other expects."""
        transfers = unfit_rows(view)
        if view.is_even or not transfers:
            return
        first = view.any_exchange
        pairs = "; ".join(
            f"rank {t.source} sends {t.sent} rows to rank {t.target}, which expects {t.expected}"
            for t in transfers[:_MOST_PAIRS]
        )
        more = len(transfers) - _MOST_PAIRS
        yield self.finding(
            f"{layer_of(first)} exchanges tokens by {call_phrase(first.call)} with splits that do "
            f"not match: {pairs}" + (f"; and {more} more pairs" if more > 0 else ""),
            ranks=ranks_in(transfers),
            step=first.event.step,
            location=call_location(first.call),
            subjects=tuple(dict.fromkeys(p.event.layer for p in view.by_rank.values())),
            evidence=evidence_of(view),
        )

    def _of_round_trip(self, view: RoundTrip) -> Iterator[Finding]:
        """Compare what a rank got and sent back, and what it sent and got back."""
        there, back = view.there, view.back
        tokens = there.event.num_tokens
        if view.is_closed or tokens in (back.rows_in, back.rows_out):
            return
        yield self.finding(
            f"{layer_of(there)} gets back a different number of tokens than it sent: "
            f"{_difference(view)}",
            ranks=RankSet([there.call.rank]),
            step=there.event.step,
            location=call_location(back.call),
            subjects=(there.event.layer,),
            severity=Severity.WARNING,
            grade=Grade.LIKELY,
            confidence=0.75,
            evidence=(_row("there", there), _row("back", back)),
            disproof="Rows are intended to be summed up or dropped between the two all-to-alls.",
        )


def _difference(view: RoundTrip) -> str:
    there, back = view.there, view.back
    parts = []
    if back.rows_in != there.rows_out:
        parts.append(f"it sent {there.rows_out} rows and gets {back.rows_in} back")
    if back.rows_out != there.rows_in:
        parts.append(f"it got {there.rows_in} rows and sends {back.rows_out} back")
    return "; ".join(parts)


def _row(way: str, part: Exchange) -> Evidence:
    return Evidence(
        ranks=RankSet([part.call.rank]),
        summary=f"{way}: {call_phrase(part.call)}, {sizes_phrase(part.call)}",
        location=call_location(part.call),
    )
