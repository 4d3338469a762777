import msgspec
import pytest

from distdiag.checks.seq.misplaced_mask import MisplacedMask
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import SeenMask, SeenPadding
from distdiag.findings.finding import Grade, Severity
from distdiag.views.sequences import MaskedSequences
from tests.checks.sequences import both, passed, shared
from tests.checks.verdicts import findings


def judged(*passes, how="all_to_all"):
    return findings(MisplacedMask, shared(*passes, how=how, kind=MaskedSequences))


def masked(number, *masks, how="all_to_all"):
    """One pass of two ranks, whose attention has these masks."""
    return [passed(rank, number, mask=masks[rank], how=how) for rank in (0, 1)]


def padded(number, *pads, how="ring", given=None):
    """One pass of two ranks in a ring, whose model is given such ids and masks."""
    return [
        passed(
            rank,
            number,
            how=how,
            peer=1 - rank,
            padding=pads[rank],
            given=given or (f"key {rank} {number}",),
        )
        for rank in (0, 1)
    ]


def parts(*digests, shares=(0.5, 0.5)):
    return SeenMask(digests, shares, num_queries=16, num_keys=16)


def aligned(where, num_keys=16):
    return SeenMask(aligned=where, num_queries=8, num_keys=num_keys)


def packed(end, rows):
    return SeenMask(ends=(end, end), num_rows=(rows, rows))


def padding(rank, mask, pads, masked, hidden, shown):
    """The mask of 20 tokens in two rows."""
    return SeenPadding(f"ids {rank}", mask, 0, 2, 20, pads, masked, hidden, shown)


RIGHT = padding(0, "first", 4, 4, 0, 0), padding(1, "second", 10, 10, 0, 0)
BEGIN = padding(0, "first", 4, 4, 0, 0), padding(1, "first", 10, 4, 0, 6)
END = padding(0, "second", 4, 10, 6, 0), padding(1, "second", 10, 10, 0, 0)
SWAPPED = padding(0, "second", 4, 10, 6, 0), padding(1, "first", 10, 4, 0, 0)
OWN = parts("a", "a"), parts("b", "b")


@pytest.mark.parametrize("pads", [BEGIN, END, SWAPPED])
def test_a_mask_of_other_tokens_is_named(pads):
    (finding,) = judged(*(padded(n, *pads) for n in (0, 1)), how="ring")
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert "does not belong to the token ids beside it, in 2 of 2 passes" in finding.message
    assert "token id 0" in finding.message
    assert len(finding.evidence) == 2


@pytest.mark.parametrize("how", ["all_to_all", "all_gather"])
def test_the_own_part_in_the_places_of_all_is_named(how):
    (finding,) = judged(*(masked(n, *OWN, how=how) for n in (0, 1)), how=how)
    assert "each rank hides the same keys in each of the 2 parts" in finding.message
    assert finding.evidence[1].summary.endswith("digest b")


def test_queries_that_are_all_placed_at_the_first_keys_are_named():
    passes = [masked(n, aligned("first"), aligned("first"), how="all_gather") for n in (0, 1)]
    (finding,) = judged(*passes, how="all_gather")
    assert finding.severity is Severity.WARNING
    assert "the 8 queries of each rank at the first 8 of 16 gathered keys" in finding.message


def test_queries_behind_texts_of_other_ranks_are_a_note():
    passes = [masked(n, aligned("last"), aligned("last"), how="all_gather") for n in (0, 1)]
    (finding,) = judged(*passes, how="all_gather")
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize(("end", "rows"), [(8, 16), (16, 8)])
def test_lengths_of_a_part_in_place_of_the_whole_are_named(end, rows):
    passes = [masked(n, packed(end, rows), packed(end, rows)) for n in (0, 1)]
    (finding,) = judged(*passes)
    assert f"they end at {end}, and there are {rows} queries" in finding.evidence[0].summary


@pytest.mark.parametrize(
    "passes",
    [
        [masked(n, parts("a", "b"), parts("a", "b")) for n in (0, 1)],
        [masked(n, parts("a", "a"), parts("a", "a")) for n in (0, 1)],
        [masked(n, parts("a", "b"), parts("b", "a")) for n in (0, 1)],
        [masked(n, parts("a", "a", shares=(1.0, 1.0)), OWN[1]) for n in (0, 1)],
        [masked(n, parts("", ""), OWN[1]) for n in (0, 1)],
        [masked(n, SeenMask(), OWN[1]) for n in (0, 1)],
        [masked(n, None, OWN[1]) for n in (0, 1)],
        [masked(0, *OWN), both(1)],
        [masked(n, aligned("first"), aligned("first")) for n in (0, 1)],
        [masked(n, packed(16, 16), packed(16, 16)) for n in (0, 1)],
        [masked(n, packed(14, 16), packed(15, 16)) for n in (0, 1)],
        [masked(n, packed(0, 0), packed(0, 0)) for n in (0, 1)],
        [both(n) for n in (0, 1)],
    ],
    ids=[
        "whole",
        "periodic",
        "another order",
        "hides nothing",
        "unread",
        "uneven",
        "one rank",
        "once",
        "whole causal",
        "packed",
        "packed and padded",
        "packed of none",
        "no mask",
    ],
)
def test_masks_of_whole_sequences_and_what_says_nothing_are_not(passes):
    assert judged(*passes) == []


@pytest.mark.parametrize(
    "masks",
    [
        (aligned("first"), aligned("")),
        (aligned("first", num_keys=8), aligned("first", num_keys=8)),
        (parts("a", "b"), parts("a", "c")),
    ],
    ids=["rows of each rank", "square", "what is ahead is hidden"],
)
def test_causal_masks_over_gathered_keys_are_not(masks):
    passes = [masked(n, *masks, how="all_gather") for n in (0, 1)]
    assert judged(*passes, how="all_gather") == []


@pytest.mark.parametrize(
    "pads",
    [
        RIGHT,
        (padding(0, "all", 4, 0, 0, 0), padding(1, "all", 10, 0, 0, 0)),
        (padding(0, "equal", 4, 4, 0, 0), padding(1, "equal", 4, 4, 0, 0)),
        (padding(0, "equal", 4, 16, 16, 0), padding(1, "equal", 4, 16, 16, 4)),
        (padding(0, "more", 4, 9, 5, 0), padding(1, "most", 10, 16, 6, 0)),
        (padding(0, "rest", 0, 4, 4, 0), padding(1, "rest", 0, 4, 4, 0)),
        (padding(0, "late", 4, 4, 2, 2), padding(1, "late", 6, 4, 0, 2)),
        (padding(0, "second", 4, 10, 6, 0), padding(0, "second", 4, 10, 6, 0)),
    ],
    ids=[
        "parts",
        "ones",
        "equal parts",
        "padding marked by ones",
        "more is hidden",
        "no padding",
        "shifted by one",
        "same tokens",
    ],
)
def test_masks_that_belong_to_their_tokens_or_hide_something_else_are_not(pads):
    assert judged(*(padded(n, *pads) for n in (0, 1)), how="ring") == []


def test_a_pass_in_which_the_mask_is_right_speaks_against_it():
    passes = [padded(n, *(BEGIN if n else RIGHT)) for n in range(3)]
    assert judged(*passes, how="ring") == []


def test_the_same_tokens_on_all_ranks_are_for_another_check():
    passes = [padded(n, *END, given=("the same",)) for n in (0, 1)]
    assert judged(*passes, how="ring") == []


def windows(rank, num_keys):
    """Causal attention of a rank to its own part and the window before it."""
    return SeenMask(aligned="last" if rank else "", num_queries=8, num_keys=num_keys)


CORRECT = {
    "a window before the own part": [windows(0, 8), windows(1, 12)],
    "head and tail of a sequence": [aligned("last", num_keys=12), aligned("last", num_keys=16)],
    "rows of a causal mask": [
        parts("a", "", shares=(1.0, 0.0)),
        parts("a", "b", shares=(1.0, 1.0)),
    ],
    "packed rows, keys up to the own part": [
        SeenMask(ends=(8, keys), num_rows=(8, keys)) for keys in (8, 16)
    ],
    "packed rows of other lengths": [packed(8, 16), packed(11, 16)],
    "documents of the whole sequence": [parts("a", "b", shares=(0.5, 0.25))] * 2,
    "keys that are seen from afar": [parts("own", "far"), parts("far", "own")],
    "biases that hide nothing": [parts("a", "a", shares=(1.0, 1.0))] * 2,
}


@pytest.mark.parametrize("how", ["all_to_all", "all_gather", "ring"])
@pytest.mark.parametrize("name", CORRECT)
def test_masks_of_correct_programs_are_not(name, how):
    assert judged(*(masked(n, *CORRECT[name], how=how) for n in range(3)), how=how) == []


def test_parts_that_are_padded_each_on_its_own_are_not():
    pads = [padding(rank, "the end of each row", 6, 6, 0, 0) for rank in (0, 1)]
    assert judged(*(padded(n, *pads) for n in (0, 1)), how="ring") == []


def test_a_rank_without_attention_leaves_the_pass_unjudged():
    first, second = (masked(n, *OWN) for n in (0, 1))
    passes = [[one, msgspec.structs.replace(two, uses=())] for one, two in (first, second)]
    assert judged(*passes) == []
