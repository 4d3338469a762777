"""NUM038: few codes of a codebook are ever chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.logged import CodebookView

LEAST_STEPS: Final = 200
"""At first all inputs are alike to the encoder, and one code is the nearest to them all."""
LAST: Final = 3
MOST_NAMED: Final = 4


class CodebookCollapse(Check[CodebookView]):
    """Few codes of a codebook are ever chosen.

    ## What you see
    Reconstructions are blurred or look alike: the encoder uses only a few codes of the codebook.
    The other codes are far from all outputs of the encoder, so they are never chosen and never
    trained.

    ## Example
        self.codes = nn.Parameter(torch.randn(512, 64) * 100)          # wrong: far from all inputs
        self.codes = nn.Parameter(torch.randn(512, 64) / 512)          # right
        # and set codes that are not used to outputs of the encoder now and then

    ## How to fix
    Reset codes that are not used: copy random outputs of the encoder into them. Or initialise the
    codebook with outputs of the encoder, or normalise codes and outputs
    (`torch.nn.functional.normalize`). Check that the commitment loss reaches the encoder and the
    codebook loss reaches the codes.

    Changes: More codes are chosen.

    Leaves: The decoder, and the other losses.

    ## When it is not a defect
    The data have no more kinds than codes that are used. `codebook_use` in `[numerics]` sets the
    threshold.

    ## References
    - https://arxiv.org/abs/2012.09841
    """

    code = "NUM038"
    name = "codebook-collapse"
    severity = Severity.WARNING

    def check(self, view: CodebookView) -> Iterator[Finding]:
        """Look at the last windows of each rank."""
        few: list[int] = []
        for rank, windows in view.by_rank.items():
            last = windows[-LAST:]
            is_late = len(last) == LAST and last[0].step >= LEAST_STEPS
            share = max((w.num_used / w.num_codes for w in last), default=1.0)
            if is_late and share < view.thresholds.codebook_use:
                few.append(rank)
        if not few:
            return
        one = view.by_rank[few[0]][-1]
        yield self.finding(
            f"{one.num_used} of {one.num_codes} codes of {view.codebook} were chosen in "
            f"{one.num_choices} choices; the perplexity is {one.perplexity:.1f}",
            ranks=RankSet(few),
            step=one.step,
            location=user_location(view.site.frames),
            subjects=(view.codebook,),
            grade=Grade.LIKELY,
            confidence=0.75,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"the last {LAST} windows used "
                    + ", ".join(str(w.num_used) for w in view.by_rank[rank][-LAST:])
                    + " codes; the most frequent are "
                    + ", ".join(
                        f"{code} ({count / view.by_rank[rank][-1].num_choices:.0%})"
                        for code, count in view.by_rank[rank][-1].counts[:MOST_NAMED]
                    ),
                )
                for rank in few
            ),
        )
