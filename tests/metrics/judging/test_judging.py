"""Healthy curves of many families give no warning; planted faults are found at their step."""

from __future__ import annotations

import numpy as np
import pytest

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.metrics.judging import Kind, judge
from tests.metrics.judging import sick
from tests.metrics.judging.healthy import FAMILIES, curves_of, healthy, language_model

NUM_HEALTHY = 900
NUM_SICK = 60
FOUND = 0.95


def worrying(observations):
    """Return the observations at warning or above."""
    return [seen for seen in observations if seen.severity is not Severity.INFO]


@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=lambda at: FAMILIES[at].__name__)
def test_healthy_curves_give_no_warning(family):
    alarms = []
    for seed in range(family, NUM_HEALTHY, len(FAMILIES)):
        alarms += worrying(judge([healthy(seed)]).observations)
    assert [f"{seen.run}: {seen.message}" for seen in alarms] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=lambda at: FAMILIES[at].__name__)
def test_many_more_healthy_curves_give_no_warning(family):
    alarms = []
    for seed in range(family + NUM_HEALTHY, 12 * NUM_HEALTHY, len(FAMILIES)):
        alarms += worrying(judge([healthy(seed)]).observations)
    assert [f"{seen.run}: {seen.message}" for seen in alarms] == []


@pytest.mark.parametrize("seed", range(20))
def test_healthy_ranks_and_restarts_give_no_warning(seed):
    rng = np.random.default_rng(seed)
    made = language_model(rng, 400)
    ranks = []
    for rank in range(6):
        own = 1 + 0.02 * rng.normal(size=400) + 0.05 * (rank == 3)  # other data, throughout
        seconds = 0.5 * (1 + 0.03 * np.abs(rng.normal(size=400)))
        series = {"loss": made["loss"] * own, "step_time_s": seconds}
        ranks.append(curves_of(series, rank=rank, name=f"rank{rank}.log"))
    assert worrying(judge(ranks).observations) == []
    assert worrying(judge(sick.restart(seed).curves).observations) == []


@pytest.mark.parametrize(
    ("plant", "kind", "tolerance"),
    [
        (sick.loss_spike, Kind.SPIKE, 0),
        (sick.norm_spike, Kind.SPIKE, 0),
        (sick.divergence, Kind.DIVERGENCE, 2),
        (sick.explosion, Kind.EXPLOSION, 2),
        (sick.lost_loss, Kind.NOT_FINITE, 0),
        (sick.rate_jump, Kind.RATE_JUMP, 0),
        (sick.rate_zero, Kind.RATE_ZERO, 0),
        (sick.scale_collapse, Kind.LOSS_SCALE, 0),
        (sick.stuck, Kind.STUCK, 0),
        (sick.zero_gradient, Kind.ZERO_GRADIENT, 0),
        (sick.slower, Kind.SLOWER, 2),
        (sick.entropy_collapse, Kind.ENTROPY_COLLAPSE, 2),
        (sick.reward_collapse, Kind.REWARD_COLLAPSE, 2),
        (sick.lost_weights, Kind.RESTART_LOSS, 0),
        (sick.new_schedule, Kind.RESTART_RATE, 0),
        (sick.rank_parts, Kind.RANKS_PART, 2),
        (sick.straggler, Kind.STRAGGLER, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_faults_are_found_at_their_step(plant, kind, tolerance):
    missed = []
    for seed in range(NUM_SICK):
        planted = plant(seed)
        several = isinstance(planted, sick.PlantedRun)
        seen = judge(planted.curves if several else [planted.curves]).of(kind)
        close = [each for each in seen if abs(each.step - planted.step) <= tolerance]
        if several and planted.rank is not None:
            close = [each for each in close if each.ranks == RankSet([planted.rank])]
        if not close:
            missed.append((seed, planted.step, [each.step for each in seen]))
    assert len(missed) <= (1 - FOUND) * NUM_SICK, missed


def test_the_minimum_of_a_validation_loss_is_named_by_its_evaluation():
    for seed in range(NUM_SICK):
        planted = sick.overfitting(seed)
        (seen,) = judge([planted.curves]).of(Kind.OVERFITTING)
        spacing = float(np.diff(planted.curves.series["val_loss"].steps)[0])
        assert abs(seen.step - planted.step) <= 2 * spacing


def test_a_divergence_after_an_epoch_names_the_step_of_the_gradient_spike():
    rng = np.random.default_rng(7)
    steps = np.arange(1, 3001)
    loss = 2.0 + 6.0 * steps**-0.3 + 0.02 * rng.normal(size=3000)
    norm = 0.8 * np.exp(0.15 * rng.normal(size=3000))
    norm[2046] = 47.3  # step 2047
    loss[2050:] += np.minimum(0.15 * np.arange(1, 951), 6.0)
    seen = judge([curves_of({"loss": loss, "grad_norm": norm})])
    (divergence,) = seen.of(Kind.DIVERGENCE)
    assert divergence.severity is Severity.ERROR
    assert abs(divergence.step - 2051) <= 2
    assert "grad_norm spiked to 47.3 at step 2047, before the loss rose" in divergence.message
    assert [(e.series, e.line, e.value) for e in divergence.evidence][-1] == (
        *("grad_norm", 2047, "47.3"),
    )


def test_an_explosion_of_gradients_ends_in_nan():
    rng = np.random.default_rng(3)
    norm = 1.1 * np.exp(0.2 * rng.normal(size=120))
    norm[100:] *= 3.0 ** np.arange(1, 21)
    loss = 3.0 - 0.005 * np.arange(120) + 0.02 * rng.normal(size=120)
    loss[108:] += 2.0 ** np.arange(1, 13)
    loss[118:] = np.nan
    judgement = judge([curves_of({"loss": loss, "grad_norm": norm})])
    (explosion,) = judgement.of(Kind.EXPLOSION)
    assert abs(explosion.step - 101) <= 2
    (lost,) = judgement.of(Kind.NOT_FINITE)
    assert (lost.step, lost.severity) == (119, Severity.ERROR)
    assert "grad_norm was" in lost.message
    assert judgement.has_error


def test_a_short_series_gives_notes_alone():
    loss = np.array([5.0, 4, 3.5, 3.2, 3, 2.9, 2.8, 6, 7, 8, 9, 9, 9])
    seen = judge([curves_of({"loss": loss})]).observations
    assert seen
    assert worrying(seen) == []


def test_not_finite_is_no_matter_of_noise():
    (seen,) = judge([curves_of({"loss": np.array([5.0, 4, np.nan])})]).observations
    assert (seen.kind, seen.severity, seen.step) == (Kind.NOT_FINITE, Severity.ERROR, 3)


def test_steps_that_begin_again_while_the_loss_goes_on_are_noted():
    rng = np.random.default_rng(0)
    loss = (1 + 4 * np.exp(-np.arange(400) / 60)) * (1 + 0.01 * rng.normal(size=400))
    parts = [curves_of({"loss": loss[:200]}), curves_of({"loss": loss[200:]}, attempt=1)]
    (seen,) = judge(parts).of(Kind.RESTART_STEPS)
    assert "the weights are loaded, the number of the step is not" in seen.message
    fresh = [curves_of({"loss": loss[:200]}), curves_of({"loss": loss[:200]}, attempt=1)]
    assert judge(fresh).of(Kind.RESTART_STEPS, Kind.RESTART_LOSS) == ()


def test_what_follows_from_a_divergence_is_left_out():
    rng = np.random.default_rng(1)
    loss = 2 + 3 * np.exp(-np.arange(600) / 50) + 0.02 * rng.normal(size=600)
    norm = np.exp(0.1 * rng.normal(size=600))
    norm[[300, 420, 500]] *= 100
    loss[302:] += 5
    judgement = judge([curves_of({"loss": loss, "grad_norm": norm})])
    assert [seen.step for seen in judgement.of(Kind.SPIKE)] == [301]
    assert [seen.step for seen in judgement.of(Kind.DIVERGENCE)] == [303]


def test_ranks_that_see_the_same_are_told_together():
    loss = np.r_[np.linspace(5, 2, 100), np.nan, np.nan]
    ranks = [curves_of({"loss": loss}, rank=rank, name=f"rank{rank}.log") for rank in range(8)]
    (seen,) = judge(ranks).of(Kind.NOT_FINITE)
    assert seen.ranks == RankSet(range(8))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 9, 10, 19, 20, 21, 40])
@pytest.mark.parametrize("fill", ["zero", "one", "falling", "nan", "huge", "negative", "step"])
def test_no_series_is_too_short_or_too_strange(size, fill):
    values = {
        "zero": np.zeros(size),
        "one": np.ones(size),
        "falling": np.linspace(5, 1, size),
        "nan": np.full(size, np.nan),
        "huge": np.full(size, 1e308) * np.linspace(-1, 1, size),
        "negative": -np.linspace(1, 2, size),
        "step": np.where(np.arange(size) < size / 2, 1.0, 100.0),
    }[fill]
    played = (
        "loss",
        "val_loss",
        "grad_norm",
        "lr",
        "throughput",
        "loss_scale",
        "reward",
        "entropy",
    )
    one = curves_of({role: values for role in (*played, "step_time_s")}, rank=0)
    other = curves_of({role: values for role in played}, rank=1, attempt=1)
    judge([one, other, curves_of({"loss": values[::-1]}, rank=1)])
