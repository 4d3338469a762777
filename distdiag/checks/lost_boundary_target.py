"""SEQ007: labels are shifted on each rank's part of a sequence, and lose those at its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.finding import Evidence, Finding, Grade, Severity
from distdiag.loss_event import LossPass
from distdiag.ranks import RankSet
from distdiag.reasoning.descriptions import user_location
from distdiag.reasoning.sequences import members_of, phrase_of
from distdiag.sequence_use_event import SequenceUse
from distdiag.sequence_view import Losses, SequenceView

_FEWEST: Final = 2


class LostBoundaryTarget(Check):
    """Labels are shifted on each rank's part of a sequence, which loses a target at each boundary.

    ## What it detects
    Ranks that share sequences leave the first label of each part out of the loss, on all of them:
    only at the beginning of the whole sequence nothing predicts it.

    ## Why it matters
    The last token of each part is not trained to predict the first one of the next part, at the
    same places of every sequence. Nothing else shows it.

    ## Example
    `input_ids, labels = (x.chunk(n, 1)[rank] for x in (input_ids, labels))`, and then a model that
    shifts its labels as it does on one rank.

    ## How to fix
    Shift the labels of the whole sequence, split them afterwards, and hand them to a loss that does
    not shift (`shift_labels` in transformers).

    ## References
    - `transformers.loss.loss_utils.ForCausalLMLoss`
    - `deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter`
    """

    code = "SEQ007"
    name = "lost-boundary-target"
    severity = Severity.WARNING
    needs = (SequenceUse,)

    why = "A shift within a part cannot reach the first token of the next one."
    fix = "Shift the labels before the split, and do not shift them again in the loss."
    fix_changes = "The loss counts one more target for each boundary of each sequence."
    fix_leaves = "The loss of all other targets."
    disproof = "The loss counts the label that follows the last token of each part."

    def check_sequences(self, view: SequenceView) -> Iterator[Finding]:
        """Count the labels that each rank leaves out."""
        for members in members_of(view):
            lost = [found for each in view.losses if (found := _lost(view, each, members))]
            if len(lost) < _FEWEST or len(lost) < len(view.losses):
                continue
            last = lost[-1]
            event = view.losses[-1][members[0]]
            later = RankSet(members[1:])
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)}, and each "
                f"leaves the first label of its parts out of the loss: at step {event.step} the "
                f"loss counts {sum(each.num_counted for each in last.values())} targets, and "
                f"{sum(last[rank].num_first for rank in later)} more were expected on "
                f"{later.phrase()}",
                ranks=RankSet(members),
                step=event.step,
                location=user_location(event.site.frames),
                grade=Grade.LIKELY,
                confidence=0.85,
                evidence=tuple(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"{each.num_counted} targets count of {each.num_elements}; "
                        f"{each.num_first} valid labels at the beginning of parts do not",
                    )
                    for rank, each in last.items()
                ),
            )


def _lost(view: SequenceView, losses: Losses, members: tuple[int, ...]) -> dict[int, LossPass]:
    """Return the losses of the ranks, if each of them leaves out first labels of its own part."""
    found: dict[int, LossPass] = {}
    for rank in members:
        num_tokens = _num_local(view, rank, len(members))
        for each in losses[rank].passes:
            is_part = each is not None and each.num_first > 0 and num_tokens > 0
            if not is_part or each is None:
                return {}
            if not _is_shifted(each, num_tokens):
                return {}
            found[rank] = each
    return found if len(found) == len(members) else {}


def _is_shifted(each: LossPass, num_tokens: int) -> bool:
    """Say whether one target is missing for each row of so many tokens."""
    # Where labels are padded before the shift, the padding is among the elements.
    is_padded = each.num_elements == num_tokens >= each.num_counted + each.num_first
    return is_padded or each.num_elements + each.num_first == num_tokens


def _num_local(view: SequenceView, rank: int, num_ranks: int) -> int:
    """Return how many tokens a rank holds, -1 if that is not known."""
    counts = {use.num_tokens for each in view.passes for use in each[rank].uses}
    if len(counts) != 1:
        return -1
    count = counts.pop()
    return count // num_ranks if view.how == "all_to_all" and count > 0 else count
