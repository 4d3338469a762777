"""MOE006: counts of tokens are summed up in a type that cannot hold them."""

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

    ## What you see
    A counter stops growing (256 + 1 is 256 in bfloat16), and sums over ranks are rounded, so biases
    and auxiliary losses balance the experts by wrong loads. The dtype of the counts cannot hold
    them exactly.

    ## Example
        # wrong: converts the buffer of counts with everything else
        model.to(torch.bfloat16)
        # right
        model.to(torch.bfloat16)
        router.tokens_per_expert = router.tokens_per_expert.float()

    ## How to fix
    Keep and reduce the counts as integers or in float32:
    `torch.bincount(experts, minlength=num_experts)`. Convert only the shares to the dtype of the
    model.

    Changes: The loads that an auxiliary loss or a bias sees.

    Leaves: Weights that were trained with rounded loads.

    ## When it is not a defect
    The tensor does not hold counts.

    If so, add `ignore = ["MOE006"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/type_info.html#torch.torch.finfo
    """

    code = "MOE006"
    name = "low-precision-counts"
    severity = Severity.WARNING

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
