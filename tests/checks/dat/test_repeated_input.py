import pytest

from distdiag.checks.dat.repeated_input import RepeatedInput
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import draw, model_fed, related

STREAM = "IterableDataset 0 by BatchSampler"


def same(number, **values):
    """All ranks are given the same batch of a stream."""
    fields = {"batch": "", "samples": (), "stream": STREAM, "inputs": (f"input {number}",)}
    return [model_fed(rank, number, **{**fields, **values}) for rank in (0, 1)]


def own(number, **values):
    """Each rank is given a batch of its own."""
    return [same(number, inputs=(f"input {number} {rank}",), **values)[rank] for rank in (0, 1)]


def judged(*passes, **values):
    return related(RepeatedInput, *passes, **values)


def test_ranks_that_read_one_stream_are_named():
    (finding,) = judged(*map(same, range(4)))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.message == (
        "DDP Net is given the same batch from IterableDataset 0 on ranks 0-1 in all 4 steps that "
        "were compared"
    )
    assert finding.location.line == 20
    assert finding.evidence[0].summary.endswith(
        "have the same bytes, in each of the backward passes 0, 1, 2, 3"
    )


def test_so_are_those_that_a_loop_of_the_program_feeds():
    (finding,) = judged(*(same(n, stream="") for n in range(4)))
    assert finding.severity is Severity.WARNING


def test_only_those_that_share_a_batch_are_named():
    passes = []
    for number in range(4):
        fed = [same(number), same(number, inputs=(f"other {number}",))]
        ranks = [fed[0][0], fed[0][1], fed[1][0], fed[1][1]]
        passes.append(
            [
                model_fed(r, number, members=(0, 1, 2), batch="", inputs=one.inputs)
                for r, one in enumerate(ranks[:3])
            ]
        )
    (finding,) = related(RepeatedInput, *passes, world=(0, 1, 2))
    assert finding.ranks == RankSet([0, 1])


@pytest.mark.parametrize(
    ("values", "is_shared"),
    [
        ({}, True),
        ({"stream": "", "draws": (draw(inside=False),)}, False),
    ],
    ids=["shared work", "drawn by the program"],
)
def test_what_may_be_meant_is_a_note(values, is_shared):
    (finding,) = judged(*(same(n, **values) for n in range(4)), is_shared_work=is_shared)
    assert finding.severity is Severity.INFO
    assert "it may be intended, since" in finding.message


def test_several_tries_at_one_batch_are_a_note():
    passes = [[same(n, draws=(draw(f"s {n} {r}"),))[r] for r in (0, 1)] for n in range(4)]
    (finding,) = judged(*passes)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "passes",
    [
        [*map(own, range(4))],
        [*map(same, range(3))],
        [*map(same, range(3)), own(3)],
        [same(n, inputs=("again",)) for n in range(4)],
        [same(n, inputs=(f"input {n % 2}",)) for n in range(4)],
        [same(n, batch_sizes=(1,)) for n in range(4)],
        [same(n, inputs=("",)) for n in range(4)],
        [same(n, inputs=()) for n in range(4)],
        [same(n, members=()) for n in range(4)],
    ],
    ids=[
        "divided",
        "too few to tell",
        "the same by chance",
        "one batch again and again",
        "two batches in turn",
        "a number and no batch",
        "not readable",
        "no tensors",
        "whose model it is nobody knows",
    ],
)
def test_right_programs_are_silent(passes):
    assert not judged(*passes)


def test_batches_that_some_generator_makes_each_time_are_a_note():
    passes = [same(n, stream="", has_drawn=n > 0) for n in range(4)]
    (finding,) = judged(*passes)
    assert finding.severity is Severity.INFO
    assert "the program draws them itself" in finding.message


def test_a_loop_that_draws_an_order_now_and_then_makes_no_batches():
    (finding,) = judged(*(same(n, stream="", has_drawn=n == 2) for n in range(4)))
    assert finding.severity is Severity.WARNING
