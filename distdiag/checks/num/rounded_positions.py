"""NUM014: a cast of the whole model rounded the frequencies of its positions."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.events.updates import PositionsRounded
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity

_LARGEST_ERROR: Final = 0.1
"""In radians. Sine and cosine in bfloat16 are rounded by 0.002 themselves; fifty times that is what
no rounding of results explains."""


class RoundedPositions(Check[PositionsRounded]):
    """A cast of the whole model rounded a buffer that turns positions into angles.

    ## What you see
    Late positions get another angle than in training or in another framework: the error of a
    frequency grows with the position. Logits of long inputs drift, short ones look right.

    ## Example
        model.bfloat16()                      # wrong: buffers such as inv_freq are cast, too

        for parameter in model.parameters():  # right: parameters only
            parameter.data = parameter.data.bfloat16()

    ## How to fix
    Cast the parameters and leave the buffers in float32, or compute the frequencies anew in float32
    after the cast.

    Changes: The angles of late positions.

    Leaves: Parameters, and the first positions.

    ## When it is not a defect
    The model was trained with the rounded frequencies, and has to keep them.

    If so, add `ignore = ["NUM014"]` to `distdiag.toml`.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/issues/8066
    """

    code = "NUM014"
    name = "rounded-positions"
    severity = Severity.WARNING

    def check(self, view: PositionsRounded) -> Iterator[Finding]:
        """Compare the error of the last angle with what rounding of a result explains."""
        if not view.largest_value > 0:
            return
        last = view.largest_angle / view.largest_value
        error = last * view.largest_error
        if not error > _LARGEST_ERROR:
            return
        ranks, location = RankSet([view.rank]), user_location(view.site.frames)
        yield self.finding(
            f"{view.buffer} of {view.model} was cast from {view.dtype_before} to {view.dtype}, "
            f"which changes angles by up to {error:.2g} rad at position {last:.0f}",
            ranks=ranks,
            step=view.step,
            location=location,
            subjects=(view.buffer,),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"the cast changes an element by {view.largest_error:.2g}",
                    location=location,
                ),
                Evidence(
                    ranks=ranks,
                    summary=f"{view.function} is given angles of up to {view.largest_angle:.4g}, "
                    f"products of positions and {view.buffer}",
                ),
            ),
        )
