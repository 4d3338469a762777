from __future__ import annotations

from distdiag.checks.par.data_disparity import DataDisparity
from distdiag.events.comparisons import Subject
from distdiag.events.ranks import RankSet
from tests.checks.divergences import divergence, findings


def test_it_names_the_ranks_and_what_they_share():
    shown = divergence(
        Subject.DATA, culprits=(0, 1), explanation="ranks 0 and 1 got the same samples"
    )
    (found,) = findings(DataDisparity, shown)
    assert found.ranks == RankSet([0, 1])
    assert "ranks 0 and 1 got the same samples" in found.message


def test_a_disparity_of_another_kind_is_left_to_another_check():
    assert findings(DataDisparity, divergence(Subject.LOSS)) == []
