"""MOE006: counts of tokens are summed up in a type that cannot hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.routing import CountsHeld
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity

_EXACT_UNTIL: Final = {"bfloat16": 2**8, "float16": 2**11}


class LowPrecisionCounts(Check[CountsHeld]):
    """Counts of tokens are summed up in a type that cannot hold them.

    ## What it detects
    A layer that routes counts the tokens of each expert, and adds the counts up or all-reduces them
    in bfloat16 or float16, and one of them is beyond what the type holds exactly (256 in bfloat16,
    2048 in float16). Counts that are converted only to be weighed by a loss are left alone.

    ## Why it matters
    In bfloat16 256 + 1 is 256: a counter stands still, sums over ranks are rounded, and biases and
    losses that balance the experts follow wrong loads.

    ## Example
    A buffer of counts that `model.to(torch.bfloat16)` has converted with everything else; one-hot
    masks that are cast to the type of the activations and summed up over ranks.

    ## How to fix
    Keep and reduce counts as integers or in float32; convert only the shares.

    ## References
    - `torch.finfo`: bfloat16 has 8 bits of significand, float16 11
    """

    code = "MOE006"
    name = "low-precision-counts"
    severity = Severity.WARNING

    why = "Whole numbers beyond the significand are rounded to multiples of two and more."
    fix = "Count in integers or float32, also where the rest of the model is of few bits."
    fix_changes = "The loads that a balancing loss or bias sees."
    fix_leaves = "What was trained with rounded loads."
    disproof = "The tensor holds no counts."

    def check(self, event: CountsHeld) -> Iterator[Finding]:
        """Compare the largest count with what the type holds exactly."""
        limit = _EXACT_UNTIL.get(event.dtype)
        if limit is None or not event.greatest > limit:
            return
        location = user_location(event.site.frames)
        yield self.finding(
            f"{event.layer or 'the model itself'} of {event.model} has counts of tokens "
            f"{event.how} in {event.dtype}, which holds whole numbers exactly only up to {limit}",
            ranks=RankSet([event.rank]),
            step=event.step,
            location=location,
            subjects=(event.layer,),
            grade=Grade.LIKELY,
            confidence=0.85,
            evidence=(
                Evidence(
                    ranks=RankSet([event.rank]),
                    summary=f"step {event.step}, {event.layer}: the largest count is "
                    f"{event.greatest:.0f} in {event.dtype}",
                    location=location,
                    values={"greatest": event.greatest},
                ),
            ),
        )
