import random

import pytest

from distdiag.checks.par.local_batch_statistics import LocalBatchStatistics
from distdiag.events.data import NormStatistics
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import model_fed, normalised_feeds
from tests.checks.verdicts import findings


def norm(mean, *, num_samples=2, num_values=128):
    return NormStatistics("backbone.1", num_samples, num_values, (mean, mean / 2), (1.0, 0.25))


def given(norms, num_passes=6, *, shared=False, **values):
    """What is found where this function draws what the norms of a rank see in a pass."""
    passes = [
        [model_fed(r, n, num_local_norms=3, norms=(norms(),), **values) for r in (0, 1)]
        for n in range(num_passes)
    ]
    shown = normalised_feeds(*passes, is_shared_work=shared)
    return findings(LocalBatchStatistics, shown)


def judged(deviation=1.0, num_passes=4, **values):
    """Ranks whose means are drawn with this deviation."""
    sizes = {name: values.pop(name) for name in ("num_samples", "num_values") if name in values}
    draws = random.Random(0)
    return given(lambda: norm(draws.gauss(0, deviation), **sizes), num_passes, **values)


def test_means_of_two_samples_that_differ_between_ranks_are_named():
    (finding,) = judged()
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert (finding.location.line, finding.subjects) == (20, ("backbone.1",))
    assert (
        "3 batch-norm layers of DDP Net normalise by the statistics of each rank's own 2 samples"
        in finding.message
    )
    assert "standard deviations apart" in finding.message


def test_over_four_samples_or_for_ranks_that_share_work_it_is_a_note():
    (finding,) = judged(num_samples=4, num_values=256, num_passes=6)
    assert finding.severity is Severity.INFO
    (finding,) = judged(shared=True)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_values", [2, 4, 8, 128, 8192])
def test_what_chance_explains_is_silent(seed, num_values):
    draws = random.Random(seed)

    def drawn():
        values = [draws.gauss(0, 1) for _ in range(num_values)]
        mean = sum(values) / num_values
        of_squares = sum((value - mean) ** 2 for value in values) / num_values
        return NormStatistics("bn", 2, num_values, (mean,), (of_squares,))

    assert not given(drawn)


def test_eight_samples_a_few_passes_or_frozen_layers_are_silent():
    assert not judged(num_samples=8, num_values=512, num_passes=6)
    assert not judged(num_passes=3)
    assert not judged(0.1)
    assert not given(lambda: norm(0.3, num_values=1), 4)


def test_the_same_samples_on_all_ranks_are_silent():
    assert not judged(inputs=("x",))
