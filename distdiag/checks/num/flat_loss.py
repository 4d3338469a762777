"""NUM032: the loss does not change by one bit from step to step."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.logged import LossNumbers
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import LossView

LEAST_STEPS: Final = 32
"""A float32 has 24 bits: that two losses are equal by chance happens, a row of 32 does not."""
LEAST_COARSE: Final = 256
"""bfloat16 has 8 bits, so that losses around a plateau are often equal for dozens of steps."""

_IF_ALIKE: Final = (
    "A loss of one and the same batch stands still when it has reached its minimum. Before that, "
    "it means that the output does not depend on the parameters."
)
_IF_FITTED: Final = "Nothing, if each step has the same batch, and the loss has come down. Else:"
"""What is said where nothing tells that batches differ."""


class FlatLoss(Check[LossView]):
    """The loss does not change by one bit from step to step.

    ## What you see
    The loss has exactly the same value in each step, although the batches differ and the optimizer
    steps. The output no longer depends on the input or on the parameters.

    ## Example
        return self.head(torch.relu(self.body(x) - 1e4))   # wrong: all zeros, so are gradients
        return self.head(torch.relu(self.body(x)))         # right

    ## How to fix
    Print the output of each layer for two different batches, and correct the first layer whose two
    outputs are equal. Common causes are dead activations, a mask that hides the whole input, and
    frozen parameters.

    Changes: The output depends on the input again.

    Leaves: The loss function, the data and the optimizer.

    ## When it is not a defect
    Each step has the same batch, as in a full-batch optimization, and the loss has reached its
    minimum: where no model is known to get different batches, it is only a note. Or the loss is
    intended to be constant, as in a benchmark. Say so with `ignore = ["NUM032"]` in the
    configuration.

    ## References
    - https://karpathy.github.io/2019/04/25/recipe/
    """

    code = "NUM032"
    name = "flat-loss"
    severity = Severity.WARNING

    def check(self, view: LossView) -> Iterator[Finding]:
        """Look at the last losses of each rank."""
        flat = {r: p for r, passes in view.by_rank.items() if (p := _flat_end(passes))}
        if not flat:
            return
        passes = flat[min(flat)]
        is_known = not view.varied.isdisjoint(flat)
        doubt = "" if is_known else "; no model is known to get other batches in other steps"
        yield self.finding(
            f"the loss was {passes[-1].loss!r}, to the last bit, in all {len(passes)} sampled "
            f"passes since step {passes[0].step}{doubt}",
            ranks=RankSet(flat),
            step=passes[0].step,
            location=user_location(view.site.frames),
            grade=Grade.LIKELY if is_known else Grade.NOTE,
            confidence=0.85 if is_known else 0.3,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"steps {each[0].step} to {each[-1].step}, learning rate "
                    f"{each[-1].rate:g}",
                    values={"loss": each[-1].loss},
                )
                for rank, each in flat.items()
            ),
            why=self.why if is_known else _IF_ALIKE,
            fix=self.fix if is_known else f"{_IF_FITTED} {self.fix}",
        )


def _flat_end(passes: Sequence[LossNumbers]) -> list[LossNumbers]:
    """Return the last passes with one loss, where there are enough, and each belongs to a step."""
    last = passes[-1].loss if passes else 0.0
    end: list[LossNumbers] = []
    for each in reversed(passes):
        if each.loss != last or each.rate == 0:
            break
        end.append(each)
    is_coarse = any(each.is_coarse for each in end) or _is_coarse(last)
    num_steps = len({each.step for each in end})
    if last == 0 or not math.isfinite(last):
        return []  # a loss of zero has been learnt, or its terms cancel out, as those of policies
    return end[::-1] if num_steps >= (LEAST_COARSE if is_coarse else LEAST_STEPS) else []


def _is_coarse(value: float) -> bool:
    """Say whether a number may have been rounded to half precision before it became wider."""
    if not math.isfinite(value) or abs(value) > 3e38:
        return True
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return bool(bits & 0x1FFF == 0)  # float16 has 10 bits after the first, bfloat16 has 7
