"""NUM041: most parameters of a model are in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.logged import ParameterView

LEAST_TENSORS: Final = 10
LEAST_PARAMETERS: Final = 1_000_000
"""A small model may well be one layer."""


class ParameterConcentration(Check[ParameterView]):
    """Most parameters of a model are in one tensor.

    ## What you see
    Most of the memory, the traffic and the optimizer state belongs to one table or projection, and
    the rest of the model is small beside it.

    ## Example
        nn.Linear(224 * 224 * 3, 4096)          # wrong: 617 million weights before the first layer
        nn.Conv2d(3, 64, 16, stride=16)         # right: 49 thousand

    ## How to fix
    Check that the size of this tensor is intended. Common causes are a vocabulary that is too
    large, a flattened image, and a table of users or items that could be hashed.

    Changes: The size of the model.

    Leaves: The other layers, and the data.

    ## When it is not a defect
    The table is intended to be that large. `parameter_share` in `[numerics]` sets the
    threshold, and it is only a note.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html
    """

    code = "NUM041"
    name = "parameter-concentration"
    severity = Severity.WARNING

    def check(self, view: ParameterView) -> Iterator[Finding]:
        """Compare the sizes of the tensors of a whole model when it is used first."""
        tensors = view.sizes
        total = sum(tensors.values())
        if len(tensors) < LEAST_TENSORS or total < LEAST_PARAMETERS:
            return
        largest = max(tensors, key=lambda name: tensors[name])
        share = tensors[largest] / total
        if share <= view.thresholds.parameter_share:
            return
        yield self.finding(
            f"{largest} has {share:.0%} of the {total} elements of {view.model}",
            ranks=RankSet([view.rank]),
            location=user_location(view.site.frames),
            subjects=(largest,),
            grade=Grade.NOTE,
            confidence=0.5,
            evidence=f"{tensors[largest]} of {total} elements in {len(tensors)} tensors",
        )
