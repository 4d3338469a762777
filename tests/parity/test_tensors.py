"""Tests of the comparison of tensors: chance may turn few elements of an update round, no more."""

import numpy as np
import pytest

from distdiag.events.comparisons import Subject
from distdiag.events.ranks import RankSet
from distdiag.parity.comparison import Comparison
from distdiag.record.recording import Kind
from tests.parity.recordings import Rank, run_of

GRADIENT = np.random.default_rng(0).normal(size=(40, 25))
UPDATE = -0.1 * np.sign(GRADIENT)
RIGHT = {"loss": 2.0, "gradient": GRADIENT, "start": np.ones((40, 25)), "update": UPDATE}


@pytest.fixture
def divergence(tmp_path):
    def divergence(*ranks):
        reference, again, perturbed = (
            run_of(tmp_path / name, "1 rank", [RIGHT]) for name in ("1", "again", "perturbed")
        )
        candidate = run_of(tmp_path / "n", "2 ranks", ranks, data_group=(0, 1))
        return (
            Comparison(reference, [again, perturbed], candidate, is_replayed=True).run().divergence
        )

    return divergence


def test_one_element_that_steps_the_other_way_is_chance(divergence):
    turned = UPDATE.copy()
    turned[3, 4] *= -1
    run = {**RIGHT, "update": turned}
    assert divergence(run, run) is None


def test_a_row_that_steps_the_other_way_is_none(divergence):
    turned = UPDATE.copy()
    turned[3] *= -1
    run = {**RIGHT, "update": turned}
    found = divergence(run, run)
    assert found.subject is Subject.UPDATE
    assert found.differences[0].name == "Net/weight"


def test_another_learning_rate_is_reported_though_rounding_hides_what_it_does(divergence):
    run = {**RIGHT, "rate": 0.101}
    found = divergence(run, run)
    assert found.subject is Subject.UPDATE
    assert found.differences[0].name == "learning rate of parameter group 0"
    assert found.differences[0].factor == pytest.approx(1.01)


@pytest.mark.parametrize(("is_kept", "culprits"), [(True, [1]), (False, None)])
def test_a_copy_that_its_wrapper_no_longer_keeps_alike_is_named(tmp_path, is_kept, culprits):
    from distdiag.parity.recorded_run import RecordedRun

    for rank, value in enumerate((1.0, 1.0 + 1e-6)):
        writer = Rank(tmp_path, rank, data_group=(0, 1))
        writer.tensor(Kind.START, 0, "Net/weight", [0.0], writes=rank == 0)
        writer.tensor(Kind.PARAMETER, 0, "Net/weight", [value], writes=rank == 0, is_kept=is_kept)
        writer.close(1, 2)
    run = RecordedRun(tmp_path, "2 ranks")
    found = Comparison(run, [run], run, is_replayed=True).run().divergence
    if culprits is None:
        assert found is None
        return
    assert (found.subject, found.step) == (Subject.UPDATE, 0)
    assert found.culprits == RankSet(culprits)
    assert "rank 1 is no longer what the others hold" in found.explanation
