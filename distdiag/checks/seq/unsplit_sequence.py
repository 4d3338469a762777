"""SEQ005: ranks that should hold parts of a sequence all hold the same tokens."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import members_of, phrase_of
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import AttentionUse
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import SequenceView, Uses

_FEWEST: Final = 2


class UnsplitSequence(Check[SequenceView]):
    """Ranks that should hold parts of a sequence all hold the same tokens.

    ## What you see
    All ranks compute the same, and attention sees each token once per rank; the loss looks good
    because causal attention finds the tokens that it should predict in another copy. Nothing splits
    the sequence between the data loader and attention.

    ## Example
        # wrong: the batch goes to the model as it came from the loader
        loss = ulysses_model(**batch).loss
        # right
        batch = {name: x.chunk(sp_size, dim=1)[sp_rank] for name, x in batch.items()}
        loss = ulysses_model(**batch).loss

    ## How to fix
    Give each rank its own part of ids, labels and positions, once, before the model or at its
    beginning: `ids = ids.chunk(world_size, dim=1)[rank]`.

    Changes: What each rank computes: one part of the tokens, each token once.

    Leaves: The layers and their all-to-alls.

    ## When it is not a defect
    The token ids that reach the first layer, printed on each rank, differ.

    If so, add `ignore = ["SEQ005"]` to `distdiag.toml`.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    - https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """

    code = "SEQ005"
    name = "unsplit-sequence"
    severity = Severity.ERROR

    def check(self, view: SequenceView) -> Iterator[Finding]:
        """Compare what ranks gave in the first layer of each pass."""
        for members in members_of(view):
            same = [number for each in view.passes if (number := _num_same(each, members))]
            contents = {each[members[0]].uses[0].given for each in view.passes}
            if len(same) < len(view.passes) or len(contents) < _FEWEST:
                continue
            first = view.passes[-1][members[0]]
            use = first.uses[0]
            location = user_location(use.site.frames)
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)} around "
                f"attention, but all of these ranks hold the same tokens: in {len(same)} of "
                f"{len(view.passes)} passes the exchanged tensors were equal to the byte, and "
                "different parts were expected",
                ranks=RankSet(members),
                step=first.step,
                location=location,
                grade=Grade.LIKELY,
                confidence=0.9,
                evidence=(
                    Evidence(
                        ranks=RankSet(members),
                        summary=f"pass {first.number}: {same[-1]} of {len(use.given)} tensors that "
                        f"were exchanged before attention are the same on all of these ranks",
                        location=location,
                        values={
                            "contents": " ".join(use.given),
                            "rows that differ": use.num_distinct,
                        },
                    ),
                ),
            )


def _num_same(by_rank: Uses, members: tuple[int, ...]) -> int:
    """Return how many tensors are the same on all ranks, 0 if that says nothing."""
    uses = [by_rank[rank].uses[0] for rank in members if by_rank[rank].uses]
    if len(uses) < len(members) or not all(map(_has_tokens, uses)):
        return 0
    columns = zip(*(use.given for use in uses), strict=False)
    return sum(len(set(column)) == 1 and column[0] != "" for column in columns)


def _has_tokens(use: AttentionUse) -> bool:
    return use.num_distinct > use.num_repeated
