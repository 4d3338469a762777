from distdiag.checks.seq.mixed_samples import MixedSamples
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.sequences import Likeness
from tests.checks.feeds import model_fed
from tests.checks.sequences import both, shared
from tests.checks.verdicts import findings


def fed(number, **values):
    return {rank: model_fed(rank, number, **values) for rank in (0, 1)}


def judged(*feeds, **values):
    view = shared(both(0), both(1), feeds=feeds, **values)
    return findings(MixedSamples, view)


def test_ranks_that_draw_different_samples_are_named():
    (finding,) = judged(fed(0), fed(1))
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert "draw different samples in 2 of 2 steps" in finding.message
    assert finding.location.line == 20


def test_the_same_samples_are_right():
    same = [fed(n, batch=f"indices {n}", samples=(f"samples {n}",)) for n in (0, 1)]
    assert judged(*same) == []


def test_parts_of_the_same_samples_are_right():
    assert judged(*[fed(n, batch=f"indices {n}") for n in (0, 1)]) == []


def test_samples_that_are_exchanged_before_are_right():
    assert judged(fed(0), fed(1), is_fed_by_others=True) == []


def test_one_step_is_not_enough():
    assert judged(fed(0)) == []


def test_a_loader_that_reads_in_order_may_give_parts_of_one_text():
    stream = "Texts 0 by BatchSampler of SequentialSampler"
    (finding,) = judged(fed(0, stream=stream), fed(1, stream=stream))
    assert finding.severity is Severity.INFO


def test_batches_of_another_size_than_the_model_is_given_say_nothing():
    assert judged(fed(0, num_batch=8), fed(1, num_batch=8)) == []


def test_samples_that_attend_to_gathered_ones_may_be_meant():
    (finding,) = judged(fed(0), fed(1), how="all_gather")
    assert finding.severity is Severity.INFO
    assert "unless samples are meant to attend to those of other ranks" in finding.message


def test_ranks_with_other_models_have_samples_of_their_own():
    assert judged(fed(0), fed(1), likeness=Likeness.OTHER_MODELS) == []
