"""SEQ013: what hides tokens from attention does not belong to the parts that ranks hold."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from distdiag.checks.base import Check
from distdiag.checks.shared.sequences import is_one_text, members_of, phrase_of
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import AttentionUse, SeenMask, SeenPadding
from distdiag.findings.descriptions import user_location
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.sequences import MaskedSequences, Uses

PADDING: Final = "padding"
"""The kind of fault that a pass without any contradicts."""
_FEWEST: Final = 2


class MaskFault(NamedTuple):
    """What is wrong with the masks of all ranks in one pass: in words, and what was seen.

    `kind` is the same for the same fault in other passes. Unless it `is_certain`, ranks that hold
    texts of their own may mean it so.
    """

    kind: str
    what: str
    expected: str
    fix: str
    seen: tuple[str, ...]
    is_certain: bool = True


def fault_of(by_rank: Uses, members: tuple[int, ...]) -> MaskFault | None:
    """Return what is wrong in a pass, None if nothing is, or if it is not known."""
    uses = [by_rank[rank].uses[0] for rank in members if by_rank[rank].uses]
    if len(uses) < max(_FEWEST, len(members)):
        return None
    masks = [use.mask for use in uses if use.mask is not None]
    how = by_rank[members[0]].how
    if len(masks) == len(uses):
        found = _miscounted(masks)
        if found is None and how != "ring":  # where each call sees the keys of one rank
            found = _repeated(masks)
        if found is None and how == "all_gather":
            found = _misaligned(masks)
        if found is not None:
            return found
    return _misplaced_padding(uses)


def is_right(by_rank: Uses, members: tuple[int, ...]) -> bool:
    """Say whether the padding mask of a pass hides padding, and nothing else, on all ranks."""
    uses = [use for rank in members for use in by_rank[rank].uses[:1]]
    found = [use.padding for use in uses if use.padding is not None]
    is_masked = len(found) == len(members) and any(each.num_masked for each in found)
    return is_masked and not any(map(_num_wrong, found))


def _misaligned(masks: list[SeenMask]) -> MaskFault | None:
    """Find queries of all ranks that causality places at one end of the gathered keys."""
    sizes = {(mask.num_queries, mask.num_keys, mask.aligned) for mask in masks}
    queries, keys, aligned = next(iter(sizes))
    if len(sizes) != 1 or not aligned or queries >= keys:
        return None
    if aligned == "first":
        seen = f"query i sees the first i + 1 of {keys} keys; the last {keys - queries} are unseen"
    else:
        seen = f"the {queries} queries stand at the end of {keys} keys, and see what is ahead"
    return MaskFault(
        kind=f"queries are placed at the {aligned} keys",
        what=f"the causal mask places the {queries} queries of each rank at the {aligned} "
        f"{queries} of {keys} gathered keys",
        expected="rows of the mask that differ from rank to rank, each at its own part of the keys",
        fix="Build the causal mask of the whole sequence, and take the rows of this rank's tokens.",
        seen=(seen,) * len(masks),
        is_certain=aligned == "first",
    )


def _miscounted(masks: list[SeenMask]) -> MaskFault | None:
    """Find lengths of packed rows that are those of a part in place of the whole, or vice versa."""
    for place, name in enumerate(("queries", "keys")):
        if any(len(mask.ends) <= place for mask in masks):
            return None
        pairs = [(mask.ends[place], mask.num_rows[place]) for mask in masks]
        is_local = all(end * len(masks) == rows for end, rows in pairs)
        is_whole = all(end == rows * len(masks) for end, rows in pairs)
        if any(end <= 0 for end, _ in pairs) or not (is_local or is_whole):
            continue
        part, whole = ("a part", "the whole sequence")[:: 1 if is_local else -1]
        return MaskFault(
            kind=f"lengths of {name}",
            what=f"the cumulative lengths are those of {part}, while attention has the {name} of "
            f"{whole}",
            expected=f"lengths that end at the number of {name}",
            fix="Compute the cumulative lengths from the tokens that attention gets after the "
            "all-to-all.",
            seen=tuple(f"they end at {end}, and there are {rows} {name}" for end, rows in pairs),
        )
    return None


def _repeated(masks: list[SeenMask]) -> MaskFault | None:
    """Find masks of a rank's own part that stand in the places of all parts."""
    for mask in masks:
        is_known = len(mask.parts) == len(masks) and "" not in mask.parts
        if not is_known or len(set(mask.parts)) > 1 or not all(0 < s < 1 for s in mask.shares):
            return None
    if len({mask.parts for mask in masks}) < _FEWEST:
        return None
    return MaskFault(
        kind="own part repeated",
        what=f"each rank hides the same keys in each of the {len(masks)} parts, and different "
        "ranks hide different keys",
        expected="the mask of the whole sequence on all ranks",
        fix="Give attention the mask of all keys that it gets: gather it, or do not split it.",
        seen=tuple(
            f"{share:.0%} of the keys of each part are seen, digest {mask.parts[0]}"
            for mask in masks
            for share in mask.shares[:1]
        ),
    )


def _misplaced_padding(uses: list[AttentionUse]) -> MaskFault | None:
    """Find masks of the ranks' token ids that are those of other parts."""
    found = [use.padding for use in uses if use.padding is not None]
    if len(found) < len(uses) or len({use.given for use in uses}) < len(uses):
        return None
    is_split = len({each.ids for each in found}) == len(found)
    # A mask that marks padding by ones is right where it differs everywhere.
    is_known = 2 * sum(map(_num_wrong, found)) <= sum(each.num_tokens for each in found)
    is_equal = len({(each.pad, each.num_rows, each.num_tokens) for each in found}) == 1
    if not (is_split and is_known and is_equal) or not (
        _are_repeated(found) or _are_swapped(found)
    ):
        return None
    return MaskFault(
        kind=PADDING,
        what="the padding mask that the model gets does not belong to the token ids beside it",
        expected=f"a mask that hides the padding (token id {found[0].pad}, as in the batch) and "
        "nothing else",
        fix="Split the mask as the token ids are split: the same dimension, the same order.",
        seen=tuple(
            f"{each.num_masked} of {each.num_tokens} places are masked, of which "
            f"{each.num_hidden} hold no padding; {_num_wrong(each) - each.num_hidden} of "
            f"{each.num_pads} places with padding are not masked"
            for each in found
        ),
    )


def _num_wrong(each: SeenPadding) -> int:
    """Count places that are masked and no padding, or padding and not masked."""
    return each.num_pads - each.num_masked + 2 * each.num_hidden


def _are_repeated(found: list[SeenPadding]) -> bool:
    """Say whether all ranks have one mask, which is wrong in more than a place of each row."""
    first = found[0]
    is_one = len({each.mask for each in found}) == 1 and 0 < first.num_masked < first.num_tokens
    has_padding = any(each.num_pads for each in found)
    return (
        is_one
        and has_padding
        and any(max(each.num_hidden, each.num_shown) > each.num_rows for each in found)
    )


def _are_swapped(found: list[SeenPadding]) -> bool:
    """Say whether as much is masked as there is padding, but elsewhere."""
    is_as_much = sum(each.num_masked for each in found) == sum(each.num_pads for each in found)
    num_hidden = sum(each.num_hidden for each in found)
    return is_as_much and num_hidden > sum(each.num_rows for each in found)


class MisplacedMask(Check[MaskedSequences]):
    """What hides tokens from attention does not belong to the parts of a sequence that ranks hold.

    ## What you see
    The loss falls, but attention sees padding or later tokens, or does not see all tokens. The mask
    or the lengths are created or split separately from the tokens, and shapes fit all the same.

    ## Example
        length = ids.shape[1] // world_size
        ids = ids[:, rank * length : (rank + 1) * length]
        # wrong: always the first part of the mask
        mask = mask[:, :length]
        # right
        mask = mask[:, rank * length : (rank + 1) * length]

    ## How to fix
    Split the mask in the same way as the token ids. Give attention the mask, or the lengths, of the
    tokens that it gets after the all-to-all.

    Changes: Which tokens attention sees, and so the loss.

    Leaves: The split of the tokens, and the all-to-alls around attention.

    ## When it is not a defect
    The mask that attention gets, printed on each rank, hides the tokens that it should.

    If so, add `ignore = ["SEQ013"]` to `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    - https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/sequence_parallel/ulysses_sp.py
    """

    code = "SEQ013"
    name = "misplaced-mask"
    severity = Severity.WARNING

    def check(self, view: MaskedSequences) -> Iterator[Finding]:
        """Compare what hides tokens in the first layer of each pass."""
        for members in members_of(view):
            faults = [(each, fault_of(each, members)) for each in view.passes]
            found = [(each, fault) for each, fault in faults if fault is not None]
            kinds = {fault.kind for _, fault in found}
            if len(kinds) != 1 or len(found) < _FEWEST:
                continue
            if kinds == {PADDING} and any(is_right(each, members) for each in view.passes):
                continue
            by_rank, fault = found[-1]
            is_sure = fault.is_certain or is_one_text(view, members)
            first = by_rank[members[0]]
            location = user_location(first.uses[0].site.frames)
            yield self.finding(
                f"{RankSet(members).phrase()} share sequences by {phrase_of(view.how)} around "
                f"attention, but {fault.what}, in {len(found)} of {len(view.passes)} passes; "
                f"expected: {fault.expected}",
                ranks=RankSet(members),
                step=first.step,
                location=location,
                grade=Grade.LIKELY if is_sure else Grade.NOTE,
                confidence=0.9 if is_sure else 0.4,
                fix=fault.fix,
                evidence=tuple(
                    Evidence(
                        ranks=RankSet([rank]),
                        summary=f"pass {first.number}: {seen}",
                        location=location,
                    )
                    for rank, seen in zip(members, fault.seen, strict=True)
                ),
            )
