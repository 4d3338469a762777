"""Tests of the comparison: the first thing that differs is named, and only that."""

import numpy as np
import pytest

from distdiag.events.comparisons import Subject
from distdiag.events.ranks import RankSet
from distdiag.parity.comparison import Comparison
from distdiag.parity.recorded_run import RecordedRun
from distdiag.record.recording import Kind
from tests.parity.recordings import Rank, run_of

GRADIENT = np.random.default_rng(0).normal(size=(6, 4))
RIGHT = {"loss": 2.0, "gradient": GRADIENT, "start": np.ones((6, 4)), "update": -0.1 * GRADIENT}


@pytest.fixture
def compare(tmp_path):
    def compare(*ranks, is_replayed=True, **summary):
        perturbed = {**RIGHT, "gradient": GRADIENT * (1 + 1e-7), "update": RIGHT["update"]}
        reference = run_of(tmp_path / "1", "1 rank", [RIGHT], num_steps=3)
        repeats = [
            run_of(tmp_path / "again", "1 rank", [RIGHT], num_steps=3),
            run_of(tmp_path / "perturbed", "1 rank", [perturbed], num_steps=3),
        ]
        label = f"{len(ranks)} ranks"
        candidate = run_of(
            tmp_path / "n", label, ranks, num_steps=3, data_group=(0, 1)[: len(ranks)], **summary
        )
        return Comparison(reference, repeats, candidate, is_replayed=is_replayed).run()

    return compare


def test_equal_runs_have_no_divergence(compare):
    left, right = {**RIGHT, "loss": 1.5}, {**RIGHT, "loss": 2.5}
    result = compare(left, right)
    assert result.divergence is None
    assert [row.step for row in result.rows] == [0, 1, 2]
    assert result.rows[0].candidate_loss == pytest.approx(2.0)


def test_losses_that_are_summed_over_ranks_are_right_too(compare):
    part = {**RIGHT, "loss": 1.0}
    assert compare(part, part).divergence is None


def test_other_weights_at_the_beginning_come_first(compare):
    wrong = {**RIGHT, "start": np.full((6, 4), 1.1), "loss": 9.0}
    found = compare(wrong, wrong).divergence
    assert (found.subject, found.step) == (Subject.START, 0)
    assert found.differences[0].name == "Net/weight"


def test_a_summed_gradient_is_explained_by_the_number_of_ranks(compare):
    wrong = {**RIGHT, "gradient": 2 * GRADIENT}
    found = compare(wrong, wrong).divergence
    assert (found.subject, found.step) == (Subject.GRADIENT, 0)
    assert "times the number of ranks (2)" in found.explanation


def test_a_loss_of_its_own_is_named_before_the_gradients_that_follow(compare):
    wrong = {**RIGHT, "loss": 1.7, "gradient": 1.3 * GRADIENT}
    assert compare(wrong, wrong).divergence.subject is Subject.LOSS


def test_a_learning_rate_shows_in_the_change_and_in_the_details(compare):
    wrong = {**RIGHT, "update": -0.101 * GRADIENT, "rate": 0.101}
    found = compare(wrong, wrong).divergence
    assert found.subject is Subject.UPDATE
    assert "1.01 times" in found.explanation
    assert any("learning rates (0.101,), not (0.1,)" in detail for detail in found.details)


def test_unlike_copies_of_a_gradient_are_reported(compare):
    right, wrong = {**RIGHT}, {**RIGHT, "gradient": 3 * GRADIENT}
    found = compare(wrong, right).divergence
    assert any("unlike gradients of Net/weight: 0 | 1" in detail for detail in found.details)


def with_outputs(folder, label, figures, repeat=1.0):
    for rank, values in enumerate(figures):
        writer = Rank(folder, rank, data_group=tuple(range(len(figures))))
        for name, rows in values.items():
            rows = np.asarray(rows, np.float32) * repeat
            writer.tensor(Kind.OUTPUT, 0, name, rows)
        writer.values(Kind.LOSS, 0, "loss", 1.0)
        writer.close(1, len(figures))


def test_the_first_module_that_differs_is_named_with_its_rank(tmp_path):
    from distdiag.parity.recorded_run import RecordedRun

    rows = np.random.default_rng(3).normal(size=(4, 3)) + 3
    wrong = rows.copy()
    wrong[3] *= 1.5
    names = ("Net/a#0", "Net/b#0")
    with_outputs(tmp_path / "1", "1", [{names[0]: rows, names[1]: rows}])
    with_outputs(tmp_path / "r", "r", [{names[0]: rows, names[1]: rows}], 1 + 1e-6)
    with_outputs(
        tmp_path / "2",
        "2",
        [{names[0]: rows[:2], names[1]: rows[:2]}, {names[0]: rows[2:], names[1]: wrong[2:]}],
    )
    runs = [RecordedRun(tmp_path / name, name) for name in ("1", "r", "2")]
    found = Comparison(runs[0], [runs[1]], runs[2], is_replayed=True).run().divergence
    assert found.subject is Subject.OUTPUT
    assert found.differences[0].name == "Net/b#0"
    assert found.culprits == RankSet([1])


def test_two_ranks_with_the_same_samples_are_reported_before_anything_else(tmp_path):
    from distdiag.parity.recorded_run import RecordedRun

    for rank in range(2):
        writer = Rank(tmp_path, rank, data_group=(0, 1), num_batches=3)
        for number in range(3):
            writer.batch(0, number, "x", [[number, 1], [number, 2]])
        writer.close(1, 2)
    run = RecordedRun(tmp_path, "2 ranks")
    found = Comparison(run, [], run, is_replayed=True).run().divergence
    assert found.subject is Subject.DATA
    assert found.culprits == RankSet([0, 1])
    assert "in 3 of 3 batches" in found.explanation


@pytest.mark.parametrize(("losses", "differs"), [((2.0, 4.0), False), ((2.0, 5.0), True)])
def test_the_losses_of_ranks_that_share_a_sequence_are_taken_together(tmp_path, losses, differs):
    runs = {}
    for label, own in (("1", (3.0,)), ("perturbed", (3.0 + 1e-6,)), ("n", losses)):
        for rank, loss in enumerate(own):
            writer = Rank(tmp_path / label, rank)
            writer.batch(0, 0, "x", [1, 2])
            writer.values(Kind.LOSS, 0, "loss", loss)
            writer.close(1, len(own))
        runs[label] = RecordedRun(tmp_path / label, label)
    comparison = Comparison(runs["1"], [runs["perturbed"]], runs["n"], is_replayed=True)
    divergence = comparison.run().divergence
    assert (divergence is not None and divergence.subject is Subject.LOSS) is differs


@pytest.mark.parametrize(("gradient", "differs"), [(GRADIENT, False), (2 * GRADIENT, True)])
def test_a_loss_that_is_multiplied_by_the_ranks_is_right_if_gradients_are(
    compare, gradient, differs
):
    scaled = {**RIGHT, "loss": 4.0, "gradient": gradient}
    divergence = compare(scaled, scaled).divergence
    assert (divergence is not None and divergence.subject is Subject.LOSS) is differs
