import pytest

from distdiag.checks.dat.divided_twice import DividedTwice
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import epoch_fed
from tests.checks.streams import together
from tests.checks.verdicts import findings

CHAIN = ("BatchSamplerShard", "BatchSampler", "RankSampler")
BOTH = ("BatchSamplerShard", "RankSampler")
HALVES = ([0, 2, 4, 6, 16, 18, 20, 22], [1, 3, 5, 7, 17, 19, 21, 23])
WHOLE = (list(range(0, 32, 2)), list(range(1, 32, 2)))


def judged(orders, **values):
    values = {"chain": CHAIN, "dividers": BOTH, **values}
    return findings(
        DividedTwice,
        together(*(epoch_fed(rank, each, **values) for rank, each in enumerate(orders))),
    )


def test_what_two_samplers_divide_is_named_with_both():
    (finding,) = judged(HALVES)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.message.startswith("16 of 32 samples of Data are read by none of 2 ranks")
    assert finding.subjects == BOTH


@pytest.mark.parametrize(
    ("orders", "values"),
    [
        (WHOLE, {}),
        (HALVES, {"dividers": ("BatchSamplerShard",)}),
        (HALVES, {"is_complete": False}),
        ((HALVES[0], HALVES[0]), {}),
        (([0, 2], [1, 3]), {}),
    ],
    ids=["all are read", "one divides", "broken off", "the same on both", "even fewer"],
)
def test_other_passes_are_silent(orders, values):
    assert not judged(orders, **values)
