import pytest

from distdiag.checks.dat.unsharded_sampler import UnshardedSampler
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import model_fed, related


def same(number, **values):
    """All ranks are given the same samples."""
    alike = {name: f"{name} {number}" for name in ("batch", "input", "samples")}
    fields = {
        "batch": alike["batch"],
        "inputs": (alike["input"],),
        "samples": (alike["samples"],),
        **values,
    }
    return [model_fed(rank, number, **fields) for rank in (0, 1)]


def judged(*passes, **values):
    return related(UnshardedSampler, *passes, **values)


def test_ranks_that_are_given_the_same_are_named():
    (finding,) = judged(same(0), same(1))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert "DDP Net is given the same samples on ranks 0-1 in 2 of 2 steps" in finding.message
    assert finding.location.line == 20


def test_noise_that_is_added_before_the_model_does_not_hide_it():
    noisy = [[*same(n)[:1], model_fed(1, n, batch=f"batch {n}", samples=(f"samples {n}",))]
             for n in (0, 1)]  # fmt: skip
    assert judged(*noisy)


def test_ranks_that_exchange_activations_may_share_samples():
    (finding,) = judged(same(0), same(1), is_shared_work=True)
    assert finding.severity is Severity.INFO


def test_a_loader_that_was_told_nothing_is_noted_only():
    stream = "Words 0 by BatchSampler of SequentialSampler"
    (finding,) = judged(same(0, stream=stream), same(1, stream=stream))
    assert finding.severity is Severity.INFO
    assert "in the order of the data set" in finding.message


def parts(number):
    """Each rank takes its half of a batch that all have read."""
    fields = {"batch": f"batch {number}", "samples": (f"samples {number}",), "batch_sizes": (2,)}
    return [model_fed(rank, number, **fields) for rank in (0, 1)]


@pytest.mark.parametrize(
    "passes",
    [
        [same(0)],
        [same(0), [model_fed(rank, 1) for rank in (0, 1)]],
        [same(0, samples=("x",)), same(1, samples=("x",))],
        [same(0, num_samples=4), same(1, num_samples=4)],
        [same(0, batch=""), same(1, batch="")],
        [same(0, samples=("",)), same(1, samples=("",))],
        [parts(0), parts(1)],
        [[model_fed(rank, n, batch="b") for rank in (0, 1)] for n in (0, 1)],
    ],
    ids=[
        "one step only",
        "once by chance",
        "one batch again and again",
        "a data set of one batch",
        "no data loader",
        "samples that cannot be read",
        "each takes its part",
        "data sets of their own",
    ],
)
def test_what_may_be_meant_is_silent(passes):
    assert not judged(*passes)
