"""SEQ007: labels are shifted on each rank's part of a sequence, and lose those at its beginning."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import is_one_text, members_of, num_local_tokens, phrase_of
from distdiag.events.losses import LossPass
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.losses import LossView
from distdiag.views.sequences import Losses, ModelEquality, SequenceView

_FEWEST: Final = 2


class LostBoundaryTarget(Check[LossView | SequenceView]):
    """Labels are shifted on each rank's part of a sequence, which loses a target at each boundary.

    ## What you see
    The last token of each part is never trained to predict the first token of the next part, and no
    number shows it. Each rank shifts the labels of its own part, and a shift within a part cannot
    reach the next part.

    ## Example
        # wrong: the model shifts the labels of this rank's part
        ids, labels = (x.chunk(size, 1)[rank] for x in (ids, labels))
        loss = model(ids, labels=labels).loss
        # right
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        ids, shifted = (x.chunk(size, 1)[rank] for x in (ids, shifted))
        loss = model(ids, shift_labels=shifted).loss

    ## How to fix
    Shift the labels of the whole sequence before the split, and give them to a loss that does not
    shift again (transformers: `shift_labels=shift_labels`).

    Changes: The loss counts one more target for each boundary of each sequence.

    Leaves: The loss of all other targets.

    ## When it is not a defect
    The loss counts the label that follows the last token of each part.

    If so, add `ignore = ["SEQ007"]` to `distdiag.toml`.

    ## References
    - https://github.com/huggingface/transformers/blob/main/src/transformers/loss/loss_utils.py
    - https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    """

    code = "SEQ007"
    name = "lost-boundary-target"
    severity = Severity.WARNING
    covers = ("PAR013", "SEQ007")

    def check(self, view: LossView | SequenceView) -> Iterator[Finding]:
        """Compare targets with labels, or count the labels that ranks leave out."""
        yield from self._of_losses(view) if isinstance(view, LossView) else self._of_sequences(view)

    def _of_losses(self, view: LossView) -> Iterator[Finding]:
        """Compare the targets that a model was given with those that its loss scores."""
        by_rank = {rank: [w.of(rank) for w in view.windows] for rank in view.ranks}
        short = {
            rank: steps
            for rank, steps in by_rank.items()
            if len(steps) >= _FEWEST
            and all(passes and all(map(_is_short, passes)) for passes in steps)
        }
        if not short:
            return
        ranks, last = RankSet(short), view.windows[-1]
        yield self.finding(
            f"the model is given shift_labels, but the loss of {view.optimizer} scores different "
            f"labels on {ranks.phrase()}: at step {last.step} it counts "
            f"{sum(each.num_counted for rank in short for each in last.of(rank))} targets there, "
            f"and {sum(each.num_targets for rank in short for each in last.of(rank))} were given",
            ranks=ranks,
            step=last.step,
            location=user_location(last.by_rank[min(ranks)].site.frames),
            grade=Grade.LIKELY,
            confidence=0.85,
            why="The last target of each part is never trained. The loss shifts the labels a "
            "second time, within this rank's part.",
            fix="Pass `shift_labels` to the loss and do not shift there again.",
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"{each.num_targets} targets in {each.num_target_rows} rows were given "
                    f"in shift_labels, the loss counts {each.num_counted}",
                )
                for rank in short
                for each in last.of(rank)
            ),
        )

    def _of_sequences(self, view: SequenceView) -> Iterator[Finding]:
        """Count the labels that each rank leaves out."""
        for members in () if view.equality is ModelEquality.OTHER_MODELS else members_of(view):
            steps = [(each[members[0]], _lost(view, each, members)) for each in view.losses]
            lost = [(event, found) for event, found in steps if found]
            if len(lost) < _FEWEST or any(found is None for _, found in steps):
                continue
            event, last = lost[-1]
            later, is_sure = RankSet(members[1:]), is_one_text(view, members)
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)}, and each "
                f"leaves the first label of its parts out of the loss: at step {event.step} the "
                f"loss counts {sum(each.num_counted for each in last.values())} targets, and "
                f"{sum(last[rank].num_first for rank in later)} more were expected on "
                f"{later.phrase()}",
                ranks=RankSet(members),
                step=event.step,
                location=user_location(event.site.frames),
                grade=Grade.LIKELY if is_sure else Grade.NOTE,
                confidence=0.85 if is_sure else 0.4,
                evidence=tuple(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"{each.num_counted} targets count of {each.num_elements}; "
                        f"{each.num_first} valid labels at the beginning of parts do not",
                    )
                    for rank, each in last.items()
                ),
            )


def _is_short(each: LossPass) -> bool:
    """Say whether up to one target for each row is missing of those that were given."""
    missing = each.num_targets - each.num_counted
    return each.num_targets > 0 and 0 < missing <= each.num_target_rows


def _lost(
    view: SequenceView, losses: Losses, members: tuple[int, ...]
) -> dict[int, LossPass] | None:
    """Return the losses of the ranks, if each of them leaves out first labels of its own part.

    Where that can be, but some part has no first labels, there are none; None if it is not so.
    """
    found: dict[int, LossPass] = {}
    for rank in members:
        num_tokens = num_local_tokens(view, rank, len(members))
        for each in losses[rank].passes:
            # More are those of the whole sequence, or of a part and its neighbour.
            if each is None or each.num_first < 0 or not 0 <= each.num_shifted < num_tokens:
                return None
            if each.num_elements not in (each.num_shifted, num_tokens):  # padded, then shifted
                return None
            found[rank] = each
    # Nothing predicts the first labels of the first part, so that they may be masked.
    later = [found.get(rank) for rank in members[1:]]
    return found if all(each is not None and each.num_first for each in later) else {}
