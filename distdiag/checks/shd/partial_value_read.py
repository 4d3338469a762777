"""SHD011: a program reads its own part of a sum or norm as if it were the whole."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.models import PartialRead
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity


class PartialValueRead(Check[PartialRead]):
    """A program reads its own part of a sum or norm as if it were the whole.

    ## What you see
    A number that is logged, compared or used for clipping belongs to one rank only; a gradient norm
    is too small by the square root of the number of shards. DTensor delays the reduction over the
    ranks, and `item()` reads the value before that reduction.

    ## Example
        # wrong: the norm of this rank's shard
        norm = torch.linalg.vector_norm(weight.grad).item()
        # right: on all ranks of the mesh
        norm = torch.linalg.vector_norm(weight.grad).full_tensor().item()

    ## How to fix
    Call `value.full_tensor().item()` instead of `value.item()` or `float(value)`, on all ranks of
    the mesh.

    Changes: The number. The call becomes a collective, so all ranks must make it.

    Leaves: Decisions that were already made with the partial number.

    ## When it is not a defect
    The program needs the part of this rank and reduces it later; then write
    `value.to_local().item()`.

    If so, add `ignore = ["SHD011"]` to `distdiag.toml`.

    ## References
    - https://github.com/radixark/miles_diffusion/issues/35
    - https://github.com/pytorch/pytorch/issues/170862
    """

    code = "SHD011"
    name = "partial-value-read"
    severity = Severity.WARNING

    def check(self, event: PartialRead) -> Iterator[Finding]:
        """Name the line that reads."""
        placements = ", ".join(event.placements)
        yield self.finding(
            f"{event.api}() gives rank {event.rank} its own part of a value with placement "
            f"{placements}, not the whole",
            ranks=RankSet([event.rank]),
            step=event.step,
            location=user_location(event.site.frames),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=f"{event.api}() of a DTensor with placement {placements}",
        )
