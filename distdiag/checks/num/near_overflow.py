"""NUM004: the output of a module comes near the largest number of its 16-bit type."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.numerics import NearOverflowView


class NearOverflow(Check[NearOverflowView]):
    """The output of a module comes near the largest number of its 16-bit type.

    ## What you see
    You see nothing yet, but the loss may become NaN soon. The largest absolute value of an
    activation in float16 is more than half of 65504, the largest number of float16: at twice this
    size it becomes infinity.

    ## Example
        hidden = self.up(x.half())                  # wrong: float16 ends at 65504
        hidden = self.up(x.bfloat16())              # right: bfloat16 ends at 3e38

    ## How to fix
    Compute this module in bfloat16 or float32 (`with torch.autocast("cuda", enabled=False):` around
    it). Or put a normalisation before it, so that its values stay small.

    Changes: Larger values stay finite.

    Leaves: The reason why the values are so large.

    ## When it is not a defect
    The values no longer grow. Silence it by `ignore = ["NUM004"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """

    code = "NUM004"
    name = "near-overflow"
    severity = Severity.WARNING

    def check(self, view: NearOverflowView) -> Iterator[Finding]:
        """Name the module, its largest value, and the limit."""
        event = min(view.by_rank.values(), key=lambda each: (each.step, each.rank))
        name = f"{event.module} ({event.module_class})" if event.module else event.module_class
        grown = ""
        if event.earlier < event.largest and event.earlier_step < event.step:
            grown = f", from {event.earlier:.4g} at step {event.earlier_step}"
        yield self.finding(
            f"the output of {name} reaches {event.largest:.4g} at step {event.step}{grown}; "
            f"{event.dtype} ends at {event.limit:.5g}",
            ranks=RankSet(view.by_rank),
            step=event.step,
            subjects=(event.module or event.model,),
            evidence=tuple(
                Evidence(ranks=RankSet([rank]), summary=f"{each.largest:.4g} at step {each.step}")
                for rank, each in sorted(view.by_rank.items())
            ),
            grade=Grade.NOTE,
        )
