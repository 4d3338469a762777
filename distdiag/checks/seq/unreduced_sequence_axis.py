"""SEQ008: gradients of parts of one sequence are never combined over the ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import members_of, phrase_of
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import Likeness, Losses, SequenceView


class UnreducedSequenceAxis(Check[SequenceView]):
    """Gradients of parts of one sequence are never combined over the ranks that share it.

    ## What it detects
    Ranks that exchange parts of sequences around attention take several optimizer steps, and after
    the first of them nothing larger than some figures is reduced, gathered or broadcast in any
    group that has two of them. Where the ranks begin with other weights it is a note.

    ## Why it matters
    Each rank gets the gradient of its own tokens. The copies of the model drift apart, and each is
    trained on one part of every sequence only.

    ## Example
    DDP or FSDP over the data-parallel group alone, where ranks that share a sequence have the same
    coordinate.

    ## How to fix
    Reduce gradients over the data-parallel and the sequence-parallel ranks together.

    ## References
    - bigcode-project/Megatron-LM#37
    """

    code = "SEQ008"
    name = "unreduced-sequence-axis"
    severity = Severity.ERROR

    why = "The group of DDP or FSDP leaves out the ranks that share a sequence, or there is none."
    fix = "Wrap the model over the data-parallel and sequence-parallel ranks together."
    fix_changes = "The gradient on every rank: it becomes that of whole sequences."
    fix_leaves = "The copies that differ already since earlier steps."
    disproof = "The gradient of a parameter is the same on these ranks when the step begins."

    def check(self, view: SequenceView) -> Iterator[Finding]:
        """Look for groups in which nothing is combined."""
        if view.is_reduced or view.how == "all_gather" or view.likeness is Likeness.OTHER_MODELS:
            return
        # Models that begin with other values may be meant to be others.
        is_sure = view.likeness is not Likeness.OTHER_VALUES
        for members in members_of(view):
            last = view.losses[-1]
            if _are_stages(last, members):
                continue
            combined = sorted({RankSet(last[rank].members or (rank,)) for rank in members}, key=str)
            use = view.passes[-1][members[0]].uses[0]
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)}, but their "
                f"gradients are not combined: over {len(view.losses)} steps that were looked at "
                "nothing was reduced between them, and one reduction in each step was expected",
                ranks=RankSet(members),
                step=last[members[0]].step,
                location=user_location(last[members[0]].site.frames),
                grade=Grade.LIKELY if is_sure else Grade.NOTE,
                confidence=0.85 if is_sure else 0.4,
                evidence=(
                    Evidence(
                        ranks=RankSet(members),
                        summary="gradients are combined over "
                        + ", ".join(each.phrase() for each in combined)
                        + ", each by itself; sequences are shared at this line",
                        location=user_location(use.site.frames),
                    ),
                ),
            )


def _are_stages(losses: Losses, members: tuple[int, ...]) -> bool:
    """Say whether only some ranks have a loss: what goes round are hidden states of a pipeline."""
    return len({any(losses[rank].passes) for rank in members}) > 1
