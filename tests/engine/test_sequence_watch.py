"""Which passports are judged together, and what is said where there were none."""

import msgspec

from distdiag.checks.seq.lost_or_duplicated_token import LostOrDuplicatedToken
from distdiag.engine.runner import Judges
from distdiag.engine.sequences import NOT_ASKED, SequenceWatch
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import SequenceUnverified
from tests.checks.passports import HALVES, passports


def fed(events, world=4):
    judges = Judges([LostOrDuplicatedToken()])
    watch = SequenceWatch(RankSet(range(world)), judges)
    for event in events:
        watch.feed(event)
    watch.finish()
    return judges.conclusions.all(), watch.not_checked


def on_ranks(parts, ranks):
    events = passports(parts).by_rank.values()
    return [
        msgspec.structs.replace(event, rank=rank, members=ranks)
        for rank, event in zip(ranks, events, strict=True)
    ]


def test_each_group_is_judged_by_itself():
    good, bad = on_ranks(HALVES, (0, 1)), on_ranks([range(1, 5), range(4, 8)], (2, 3))
    findings, not_checked = fed([bad[1], *good, bad[0]])
    assert {finding.ranks for finding in findings} == {RankSet([2])}
    assert not_checked == {}


def test_a_group_of_which_ranks_are_silent_is_not_judged():
    findings, not_checked = fed(on_ranks(HALVES, (0, 1))[:1])
    assert findings == ()
    assert not_checked == {"SEQ001": "only rank 0 told what became of the tokens"}


def test_without_any_passport_it_says_how_to_get_one():
    assert fed([]) == ((), {"SEQ001": NOT_ASKED})


def test_ranks_that_disagree_about_the_group_are_not_compared():
    events = on_ranks(HALVES, (0, 1))
    events[0] = msgspec.structs.replace(events[0], members=(0, 2))
    assert fed(events)[0] == ()


def test_what_a_library_has_and_was_not_verified_is_told():
    told = SequenceUnverified(rank=0, seq=1, time_ns=0, name="lib:split", reason="no group")
    findings, not_checked = fed([told, *on_ranks(HALVES, (0, 1))])
    assert findings == ()
    assert not_checked == {"SEQ001": "lib:split: no group"}
