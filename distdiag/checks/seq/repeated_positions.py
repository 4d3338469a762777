"""SEQ011: ranks hold different parts of a sequence, but give tokens the same positions."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import members_of, phrase_of
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import PositionedSequences, Uses

_FEWEST: Final = 2


class RepeatedPositions(Check[PositionedSequences]):
    """Ranks hold different parts of a sequence, but place their tokens at the same positions.

    ## What you see
    The model gets worse, because distances between tokens of different parts are wrong. Each rank
    places its part at the beginning of the sequence.

    ## Example
        # wrong: counts within this rank's part
        position_ids = torch.arange(input_ids.shape[1])
        # right
        begin = rank * input_ids.shape[1]
        position_ids = torch.arange(begin, begin + input_ids.shape[1])

    ## How to fix
    Split the positions of the whole sequence in the same way as its tokens:
    `position_ids = torch.arange(length).chunk(world_size)[rank]` for contiguous parts. Or compute
    the rotary angles from these positions.

    Changes: What attention computes between tokens of different parts.

    Leaves: The layers and their all-to-alls.

    ## When it is not a defect
    The positions that reach attention, printed on each rank, differ.

    If so, add `ignore = ["SEQ011"]` to `distdiag.toml`. It is a note where attention is given a
    mask or document lengths, or a function may shift positions.

    ## References
    - https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    - https://docs.pytorch.org/docs/stable/distributed.tensor.html
    """

    code = "SEQ011"
    name = "repeated-positions"
    severity = Severity.WARNING

    def check(self, view: PositionedSequences) -> Iterator[Finding]:
        """Compare the positions of the ranks' tokens in the first layer of each pass."""
        for members in members_of(view):
            same = [each for each in view.passes if _is_same(each, members)]
            if len(same) < max(_FEWEST, len(view.passes)):
                continue
            first = view.passes[-1][members[0]]
            use = first.uses[0]
            location = user_location(use.site.frames)
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)} around "
                f"attention and hold different tokens, but the same positions: in {len(same)} of "
                f"{len(view.passes)} passes the positions of all ranks were equal to the byte, and "
                f"each rank's own part was expected{f'; but {use.doubt}' * bool(use.doubt)}",
                ranks=RankSet(members),
                step=first.step,
                location=location,
                grade=Grade.NOTE if use.doubt else Grade.LIKELY,
                confidence=0.4 if use.doubt else 0.85,
                evidence=(
                    Evidence(
                        ranks=RankSet(members),
                        summary=f"pass {first.number}: the module with attention is given the same "
                        f"{len(use.positions)} tensors of positions or angles on all of these "
                        "ranks",
                        location=location,
                        values={"contents": " ".join(use.positions)},
                    ),
                ),
            )


def _is_same(by_rank: Uses, members: tuple[int, ...]) -> bool:
    """Say whether the ranks bring different tokens to the same positions."""
    uses = [by_rank[rank].uses[0] for rank in members if by_rank[rank].uses]
    if len(uses) < len(members) or any("" in (*use.given, *use.positions) for use in uses):
        return False
    is_placed = all(use.given and use.positions for use in uses)
    is_split = len({use.given for use in uses}) == len(uses)
    return is_placed and is_split and len({use.positions for use in uses}) == 1
