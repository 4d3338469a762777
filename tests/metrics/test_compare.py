"""Two runs part where one of them changes, and not where they only have other noise."""

from __future__ import annotations

import numpy as np
import pytest

from distdiag.metrics.compare import compare
from distdiag.metrics.runs import Run, runs_of
from tests.metrics.judging.healthy import KINDS, curves_of, decay, noise


def pair(seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Return two runs of one trend, each with noise of its own."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([60, 200, 1000]))
    trend, kind = decay(rng, size), KINDS[rng.integers(len(KINDS))]
    strength = rng.choice([0.002, 0.01, 0.05])
    first, second = (trend * (1 + strength * noise(rng, size, kind)) for _ in range(2))
    return rng, first, second


def compared(first: np.ndarray, second: np.ndarray):
    """Return how the only series of two runs compares."""
    a, b = (Run(name, (curves_of({"loss": v}),)) for name, v in (("a", first), ("b", second)))
    (parting,) = compare(a, b).partings
    return parting


def test_noise_is_no_parting():
    for seed in range(200):
        _, first, second = pair(seed)
        assert compared(first, second).parts_at is None, seed


def test_a_lasting_difference_is_found_where_it_begins():
    missed = []
    for seed in range(100):
        rng, first, second = pair(seed)
        at = int(rng.integers(len(first) * 0.3, len(first) * 0.85))
        spread = float(np.std((first - second)[max(at - 30, 0) : at]))
        second[at:] += np.minimum(3.0 * (np.arange(len(first) - at) + 1), 12) * spread
        parts_at = compared(first, second).parts_at
        if parts_at is None or abs(parts_at - (at + 1)) > 3:
            missed.append((seed, at + 1, parts_at))
    assert len(missed) <= 5, missed


def test_the_first_different_digit_is_found_exactly():
    loss = np.round(5 / np.sqrt(np.arange(1, 101)), 4)
    other = loss.copy()
    other[70:] += 1e-4
    parting = compared(loss, other)
    assert (parting.first_difference, parting.num_equal) == (71, 70)
    assert compared(loss, loss).first_difference is None


def test_what_is_logged_at_other_steps_is_compared_where_both_have_it():
    loss = 5 / np.sqrt(np.arange(1, 101))
    every, tenth = np.arange(1, 101), np.arange(10, 101, 10)
    a = Run("a", (curves_of({"loss": (every, loss)}),))
    b = Run("b", (curves_of({"loss": (tenth, loss[9::10])}),))
    (parting,) = compare(a, b).partings
    assert (parting.num_steps, parting.first_difference) == (10, None)


def test_a_later_attempt_replaces_what_it_repeats():
    loss = 5 / np.sqrt(np.arange(1, 101))
    wrong = loss[:60].copy()
    wrong[50:] = 9
    steps = np.arange(1, 101)
    attempts = [
        curves_of({"loss": (steps[:60], wrong)}),
        curves_of({"loss": (steps[50:], loss[50:])}, attempt=1),
    ]
    (run,) = runs_of(attempts)
    (parting,) = compare(run, Run("b", (curves_of({"loss": loss}),))).partings
    assert parting.first_difference is None


def test_what_only_one_run_has_is_said():
    loss = np.linspace(3, 1, 50)
    a = Run("a", (curves_of({"loss": loss, "bleu": loss}),))
    b = Run("b", (curves_of({"loss": loss[:3]}),))
    comparison = compare(a, b)
    assert comparison.partings == ()
    assert comparison.not_compared == (
        "bleu: only one run has it",
        "loss: fewer than 5 steps are in both",
    )


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_role_is_compared_under_two_names(name):
    loss = np.linspace(3, 1, 50)
    roles = {"a": {"loss": "lm loss"}, "b": {"loss": "train/loss"}}
    runs = {
        key: Run(key, (curves_of({played["loss"]: loss}, roles=played),))
        for key, played in roles.items()
    }
    other = runs["b" if name == "a" else "a"]
    (parting,) = compare(runs[name], other).partings
    assert (parting.role, parting.first_difference) == ("loss", None)
