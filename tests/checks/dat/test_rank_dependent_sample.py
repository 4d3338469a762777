import pytest

from distdiag.checks.dat.rank_dependent_sample import RankDependentSample
from distdiag.engine.data import DataAligner
from distdiag.events.ranks import RankSet
from distdiag.views.data import SampleContentsView
from tests.checks.feeds import epoch_fed
from tests.checks.verdicts import findings
from tests.engine.aligned import aligned

PARTS = (("x", False), ("group", True))
HALVES = [range(16), range(16, 32)], [range(8, 24), [*range(8), *range(24, 32)]]


def judged(content, parts=PARTS, passes=HALVES):
    """Two passes, in which half of the samples come on the other rank; `content` is their parts."""
    events = [
        epoch_fed(
            rank,
            list(order),
            number=number,
            parts=parts,
            samples=tuple((i, content(i, rank, number)) for i in order),
        )
        for number, orders in enumerate(passes)
        for rank, order in enumerate(orders)
    ]
    views, _, _ = aligned(DataAligner, *events, world=RankSet([0, 1]))
    shown = [view for view in views if isinstance(view, SampleContentsView)]
    return findings(RankDependentSample, shown[-1]) if shown else []


def test_a_number_that_each_rank_makes_otherwise_is_named():
    (finding,) = judged(lambda i, rank, _: (f"x{i}", f"g{i}{rank}"))
    assert finding.message.startswith("`group` of a sample of Data is not the same on all ranks")
    assert "of 16 samples that came on several of them it differs in 16" in finding.message
    assert finding.ranks == RankSet([0, 1])


@pytest.mark.parametrize(
    "content",
    [
        lambda i, *_: (f"x{i}", f"g{i}"),
        lambda i, rank, number: (f"x{i}", f"g{i}{rank}{number}"),  # drawn anew each time
        lambda i, rank, _: (f"x{i}{rank}", f"g{i}{rank}"),  # data of its own
        lambda i, rank, number: (f"x{i}{rank}{number}", f"g{i}"),  # changed at random
        lambda i, rank, _: (f"x{i}", f"g{i}{rank if i < 6 else 0}"),  # few
    ],
)
def test_other_samples_are_silent(content):
    assert not judged(content)


def test_noise_that_each_rank_has_is_silent():
    parts = (("x", False), ("noise", False))
    assert not judged(lambda i, rank, _: (f"x{i}", f"n{i}{rank}"), parts)


def test_one_pass_tells_nothing():
    assert not judged(lambda i, rank, _: (f"x{i}", f"g{i}{rank}"), passes=HALVES[:1])
