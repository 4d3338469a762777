"""Which batches of recorded runs are compared: those that were trained on."""

import numpy as np
import pytest

from distdiag.parity.batches import differing_data, shared_samples
from distdiag.parity.recorded_run import RecordedRun
from tests.parity.recordings import Rank


@pytest.fixture
def run(tmp_path):
    def run(label, *ranks):
        """Ranks with their iterators, each a list of batches, and the numbers of those trained."""
        folder = tmp_path / label
        folder.mkdir()
        for number, (iterators, trained) in enumerate(ranks):
            rank = Rank(folder, number, trained=trained, data_group=tuple(range(len(ranks))))
            for iterator, batches in enumerate(iterators):
                for place, batch in enumerate(batches):
                    rank.batch(iterator, place, "0", np.array(batch))
            rank.close(1, len(ranks))
        return RecordedRun(folder, label)

    return run


HELD_OUT = [[90], [91], [92]]


def test_ranks_may_all_be_evaluated_on_the_same_samples(run):
    ranks = [[[rank], [rank + 2]] for rank in (0, 1)]
    found = run("two", *(([own, HELD_OUT], (0,)) for own in ranks))
    assert shared_samples(found)[0] == ""
    assert shared_samples(run("all", *(([own, HELD_OUT], (0, 1)) for own in ranks)))[0]


def test_an_evaluation_on_one_rank_does_not_hide_which_samples_come(run):
    alone = ([HELD_OUT, [[0], [2]]], (1,))
    other = ([[[1], [3]]], (0,))
    reference = run("one", ([HELD_OUT, [[0, 1], [2, 3]]], (1,)))
    assert differing_data(reference, run("two", alone, other)) == ""
    changed = ([[[1], [4]]], (0,))
    assert "batch 1 has 1 of 2" in differing_data(reference, run("changed", alone, changed))
