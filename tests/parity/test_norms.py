"""Tests of the norm that clipping used: it belongs to the whole gradients, on any ranks."""

import math

import numpy as np

from distdiag.events.comparisons import Subject
from distdiag.parity.comparison import Comparison
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.tensors import norm_pairs
from distdiag.record.recording import Kind
from tests.parity.recordings import Rank

GRADIENT = np.random.default_rng(0).normal(size=(6, 4))
NORM = float(np.linalg.norm(GRADIENT.astype(np.float32)))


def run(folder, *norms):
    for rank, norm in enumerate(norms):
        writer = Rank(folder, rank, data_group=tuple(range(len(norms))))
        writer.tensor(Kind.START, 0, "Net/w", np.ones((6, 4)), writes=rank == 0)
        writer.values(Kind.LOSS, 0, "loss", 1.0)
        writer.tensor(Kind.GRADIENT, 0, "Net/w", GRADIENT, writes=rank == 0)
        writer.values(Kind.NORM, 0, "norm", norm)
        writer.tensor(Kind.PARAMETER, 0, "Net/w", 1 - 0.1 * GRADIENT, writes=rank == 0)
        writer.close(1, len(norms))
    return RecordedRun(folder, f"{len(norms)} ranks")


def test_the_same_norm_on_all_ranks_is_within_the_bound(tmp_path):
    (pair,) = norm_pairs(run(tmp_path / "1", NORM), run(tmp_path / "2", NORM, NORM), 0)
    assert pair.difference.ratio < 0.1


def test_a_norm_of_some_parameters_only_is_right_if_it_is_so_everywhere(tmp_path):
    (pair,) = norm_pairs(run(tmp_path / "1", NORM / 3), run(tmp_path / "2", NORM / 3, NORM / 3), 0)
    assert pair.difference.ratio < 0.1


def test_the_norm_of_a_local_shard_is_explained_by_the_root_of_the_ranks(tmp_path):
    local = NORM / math.sqrt(2)
    one, two = run(tmp_path / "1", NORM), run(tmp_path / "2", local, local)
    found = Comparison(one, [one], two, is_replayed=True).run().divergence
    assert found.subject is Subject.UPDATE
    assert found.differences[0].name == "norm that clipping used"
    assert "divided by the square root of the number of ranks (2)" in found.explanation


def test_norms_that_are_no_numbers_are_left_to_other_comparisons(tmp_path):
    one, two = run(tmp_path / "1", NORM), run(tmp_path / "2", math.inf, math.inf)
    assert list(norm_pairs(one, two, 0)) == []
