"""Makes events of exchanges around attention, once all that is read of them is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distdiag.probes.sequence_exchanges import Use
from distdiag.probes.tensor_content import Pending
from distdiag.sequence_use_event import AttentionUse


def settled(uses: Sequence[Use]) -> Iterator[AttentionUse]:
    """Yield what is written down; all contents are there."""
    for use in uses:
        digests: list[str] = []
        distinct = -1
        for exchange in use.before:
            found = exchange.content.take() if exchange.content is not None else None
            parts = [] if found is None else [each.digest if each else "" for each in found[:-1]]
            digests.append("".join(parts) if parts and "" not in parts else "")
            last = found[-1] if found else None
            distinct = max(distinct, int(last.mean) if last is not None else -1)
        heads = use.attention.num_heads * len(use.members)
        is_by_head = use.attention.width in (0, use.before[0].width)
        yield AttentionUse(
            given=tuple(digests),
            num_distinct=distinct,
            num_repeated=heads if is_by_head else len(use.members),
            num_tokens=use.attention.num_tokens,
            is_returned=use.is_returned,
            peer=use.before[0].peer,
            site=use.site,
            positions=() if use.positions is None else _digests(use.positions),
            doubt=use.doubt,
            mask=None if use.mask is None else use.mask.settle(use.mask.pending.take() or []),
            padding=use.padding.settle(use.padding.pending.take() or []) if use.padding else None,
        )


def _digests(pending: Pending) -> tuple[str, ...]:
    return tuple(each.digest if each else "" for each in pending.take() or ())


def are_ready(uses: Sequence[Use]) -> bool:
    """Say whether all contents have been read."""
    return all([each.take() is not None for use in uses for each in use.pending])
