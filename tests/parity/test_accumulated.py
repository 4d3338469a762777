"""Tests of runs that take their steps in unlike numbers of passes."""

import numpy as np

from distdiag.parity.batches import differing_data
from distdiag.parity.losses import loss_pairs
from distdiag.parity.recorded_run import RecordedRun
from tests.parity.recordings import Rank

SAMPLES = np.arange(16).reshape(8, 2)


def run_of(folder, losses, *, samples=SAMPLES, num_steps=2):
    """Return a run of one rank with one batch and one of the `losses` in each pass."""
    num_passes = len(losses)
    writer = Rank(folder, 0, num_microsteps=(num_passes,) * num_steps)
    for number, batch in enumerate(np.split(samples, num_passes * num_steps)):
        writer.batch(0, number, "x", batch)
    for step in range(num_steps):
        for micro, loss in enumerate(losses):
            writer.values("loss", step, "loss", loss, micro=micro)
    writer.close(num_steps, 1)
    return RecordedRun(folder, folder.name)


def ratios(tmp_path, losses):
    once, perturbed = run_of(tmp_path / "once", [2.0]), run_of(tmp_path / "perturbed", [2.000001])
    several = run_of(tmp_path / "several", losses)
    return [pair.difference.ratio for pair in loss_pairs(once, [perturbed], several, 0)]


def test_losses_of_a_step_may_be_summed_or_averaged_over_its_passes(tmp_path):
    (summed,) = ratios(tmp_path / "summed", [0.5, 1.5])
    (averaged,) = ratios(tmp_path / "averaged", [1.0, 3.0])
    assert max(summed, averaged) <= 1


def test_another_loss_of_a_step_differs(tmp_path):
    (ratio,) = ratios(tmp_path, [0.5, 1.7])
    assert ratio > 1


def test_the_samples_of_a_step_are_the_same_in_any_number_of_batches(tmp_path):
    once, twice = run_of(tmp_path / "once", [2.0]), run_of(tmp_path / "twice", [1.0, 1.0])
    assert differing_data(once, twice) == ""


def test_other_samples_of_a_step_differ(tmp_path):
    once = run_of(tmp_path / "once", [2.0])
    other = run_of(tmp_path / "other", [1.0, 1.0], samples=SAMPLES + 1)
    assert "other samples" in differing_data(once, other)
