from distdiag.checks.unreduced_sequence_axis import UnreducedSequenceAxis
from distdiag.finding import Severity
from distdiag.ranks import RankSet
from tests.checks.losses import mean, told
from tests.checks.sequences import both, shared


def judged(**values):
    losses = tuple({r: told(r, [mean(8)], step=n, members=(r, r + 2)) for r in (0, 1)}
                   for n in range(3))  # fmt: skip
    view = shared(both(0), both(1), losses=losses, **values)
    return list(UnreducedSequenceAxis().check_sequences(view))


def test_ranks_between_which_nothing_is_reduced_are_named():
    (finding,) = judged(is_reduced=False)
    assert finding.severity is Severity.ERROR
    assert finding.ranks == RankSet([0, 1])
    assert "over 3 steps" in finding.message
    assert "ranks 0,2, ranks 1,3, each by itself" in finding.evidence[0].summary


def test_ranks_that_reduce_are_right():
    assert judged(is_reduced=True) == []


def test_gathered_keys_come_back_as_sums_of_gradients():
    assert judged(is_reduced=False, how="all_gather") == []
