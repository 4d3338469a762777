"""NUM014: a cast of the whole model rounded the frequencies of its positions."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.updates import PositionsView

_LARGEST_ERROR: Final = 0.1
"""In radians. Sine and cosine in bfloat16 are rounded by 0.002 themselves; fifty times that is what
no rounding of results explains."""


class RoundedPositions(Check[PositionsView]):
    """A cast of the whole model rounded a buffer that turns positions into angles.

    ## What you see
    Outputs for long inputs drift, while short inputs look right. A cast of the whole model rounded
    the frequencies that turn positions into angles, and the error of an angle grows with the
    position.

    ## Example
        model.bfloat16()                      # wrong: buffers such as inv_freq are cast, too

        for parameter in model.parameters():  # right: parameters only
            parameter.data = parameter.data.bfloat16()

    ## How to fix
    Cast the parameters only and leave the buffers in float32:
    `for p in model.parameters(): p.data = p.data.to(torch.bfloat16)`. Or compute the frequencies
    again in float32 after the cast.

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

    def check(self, view: PositionsView) -> Iterator[Finding]:
        """Compare the error of the last angle with what rounding of a result explains."""
        seen, ranks = view.any_event, view.ranks
        if not seen.largest_value > 0:
            return
        last = seen.largest_angle / seen.largest_value
        error = last * seen.largest_error
        if not error > _LARGEST_ERROR:
            return
        location = user_location(seen.site.frames)
        yield self.finding(
            f"{seen.buffer} of {seen.model} was cast from {seen.dtype_before} to {seen.dtype}, "
            f"which changes angles by up to {error:.2g} rad at position {last:.0f}",
            ranks=ranks,
            step=seen.step,
            location=location,
            subjects=(seen.buffer,),
            grade=Grade.LIKELY,
            confidence=0.9,
            evidence=(
                Evidence(
                    ranks=ranks,
                    summary=f"the cast changes an element by {seen.largest_error:.2g}",
                    location=location,
                ),
                Evidence(
                    ranks=ranks,
                    summary=f"{seen.function} is given angles of up to {seen.largest_angle:.4g}, "
                    f"products of positions and {seen.buffer}",
                ),
            ),
        )
