"""SHD011: a program reads its own part of a sum or norm as if it were the whole."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.models import PartialRead
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity


class PartialValueRead(Check[PartialRead]):
    """A program reads its own part of a sum or norm as if it were the whole.

    ## What it detects
    `item()` or `float()` of a DTensor that has a partial placement: each rank holds a part of the
    result, and the reduction is still to come.

    ## Why it matters
    The number that is logged, compared or used to clip is that of one rank. A gradient norm is too
    small by the square root of the number of shards.

    ## Example
    `torch.linalg.vector_norm(weight.grad).item()` of a sharded weight.

    ## How to fix
    Call `full_tensor()` first: it reduces over the ranks.

    ## References
    - radixark/miles_diffusion#35, pytorch/pytorch#170862
    """

    code = "SHD011"
    name = "partial-value-read"
    severity = Severity.WARNING

    why = "DTensor puts reductions off until a value is needed, and `item()` takes what is there."
    fix = "Write `value.full_tensor().item()`, on all ranks of the mesh."
    fix_changes = "The number; and the call becomes a collective, so that all ranks must make it."
    fix_leaves = "Decisions that were taken from the partial number before."
    disproof = "The value equals that of `full_tensor()`."

    def check(self, event: PartialRead) -> Iterator[Finding]:
        """Name the line that reads."""
        location = user_location(event.site.frames)
        placements = ", ".join(event.placements)
        yield self.finding(
            f"{event.api}() gives rank {event.rank} its own part of a value with placement "
            f"{placements}, not the whole",
            ranks=RankSet([event.rank]),
            step=event.step,
            location=location,
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                Evidence(
                    ranks=RankSet([event.rank]),
                    summary=f"{event.api}() of a DTensor with placement {placements}",
                    location=location,
                ),
            ),
        )
