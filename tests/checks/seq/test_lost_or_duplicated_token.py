import pytest

from distdiag.checks.seq.lost_or_duplicated_token import LostOrDuplicatedToken
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import PAD
from distdiag.findings.finding import Grade, Severity
from tests.checks.token_traces import HALVES, spec, token_traces
from tests.checks.verdicts import findings


def test_a_part_that_begins_late_is_named_with_the_tokens():
    lost, twice = findings(LostOrDuplicatedToken, token_traces([range(1, 5), range(4, 8)]))
    assert lost.severity is Severity.ERROR
    assert lost.grade is Grade.PROVEN
    assert lost.ranks == twice.ranks == RankSet([0])
    assert lost.location.line == 10
    assert "token 0 came to no rank; rank 0: it has 1-4 instead of 0-3" in lost.message
    assert "token 4 came to several ranks" in twice.message


def test_a_sequence_that_is_not_split_is_said_to_be_whole_everywhere():
    (finding,) = findings(LostOrDuplicatedToken, token_traces([range(8), range(8)]))
    assert "every rank has the whole sequence" in finding.message


def test_tokens_that_the_gather_loses_are_its_own():
    seen = [range(8), [*range(4), PAD, PAD, 6, 7]]
    (finding,) = findings(LostOrDuplicatedToken, token_traces(HALVES, seen))
    assert (finding.ranks, finding.location.line) == (RankSet([1]), 20)
    assert "tokens 4-5 went missing in the gathered sequence" in finding.message


def test_padding_that_stays_is_named():
    parts = [[0, 1, 2, 3], [4, 5, 6, PAD]]
    seen = [[*range(7), PAD]] * 2
    (finding,) = findings(LostOrDuplicatedToken, token_traces(parts, seen, of=spec(7)))
    assert "8 places for 7 tokens" in finding.message


def test_what_raises_everywhere_is_a_note_and_on_one_rank_a_warning():
    error, stage = "IndexError: index 1 is out of bounds", "split"
    view = token_traces(HALVES, error=[error, error], stage=[stage, stage])
    (finding,) = findings(LostOrDuplicatedToken, view)
    assert finding.grade is Grade.NOTE
    view = token_traces(HALVES, error=[error, ""], stage=[stage, ""])
    (finding,) = findings(LostOrDuplicatedToken, view)
    assert finding.ranks == RankSet([0])
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)


@pytest.mark.parametrize(
    "view",
    [
        token_traces(HALVES),
        token_traces([[0, 1, 6, 7], [2, 3, 4, 5]]),
        token_traces([range(0, 8, 2), range(1, 8, 2)]),
        token_traces([range(5), range(5, 8)]),
        token_traces([range(4), [4, 5, 6, PAD]], [range(7)] * 2, of=spec(7)),
        token_traces([range(8)]),
    ],
    ids=["contiguous", "head-tail", "interleaved", "uneven", "padded", "alone"],
)
def test_parts_that_cover_the_sequence_are_silent(view):
    assert not findings(LostOrDuplicatedToken, view)


def test_parts_are_judged_where_nothing_gathers():
    nowhere = {"gathered": [(), ()], "gathered_shape": [(), ()]}
    assert not findings(LostOrDuplicatedToken, token_traces(HALVES, **nowhere))
    (finding,) = findings(LostOrDuplicatedToken, token_traces([range(4), range(5, 8)], **nowhere))
    assert "token 4 came to no rank" in finding.message
