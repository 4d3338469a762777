import pytest

from distdiag.checks.shd.neglected_buffer import Neglect, NeglectedBuffer, NeglectedBuffers
from distdiag.engine.aligner import NotObserved
from distdiag.engine.models.writes import WriteAligner
from tests.checks.lives import MOVING, SAME, run
from tests.checks.models import ZEROS, content, plan
from tests.engine.aligned import aligned, broken


def counts(total, *, least=0.0):
    """Numbers of one sum, which are others each time."""
    counts.number += 1
    digest = f"cc{counts.number}"
    return content(total, least=least, greatest=total + 1, digest=digest)


counts.number = 0

CONSERVED = (8.0, 8.0, 8.0)
GROWING = (8.0, 16.0, 24.0)


def module(path, *, shape=(4,), requires_grad=True):
    return [
        plan(f"{path}.gate.weight", requires_grad=requires_grad),
        plan(f"{path}.bias", shape=shape, is_parameter=False, requires_grad=False),
        plan(f"{path}.counts", shape=shape, is_parameter=False, requires_grad=False),
    ]


def neglected(*lives, paths=("a.0", "a.1", "a.2", "b"), ranks=2, **last):
    """What is shown of modules that have these biases and counts at some steps."""
    plans = [p for path in paths[:-1] for p in module(path)] + module(paths[-1], **last)
    by_rank = []
    for rank in range(ranks):
        held = []
        for biases, sums in lives:
            of_rank = biases(rank) if callable(biases) else biases
            weights = tuple(0.1 * number for number, _ in enumerate(sums))
            held += [weights, of_rank, [counts(each) if each else ZEROS for each in sums]]
        by_rank.append(held)
    events = run(by_rank, [plans] * ranks, steps=len(lives[0][1]))
    made = aligned(WriteAligner, *events, checks=[NeglectedBuffer()])
    views = [view for view in made.views if isinstance(view, NeglectedBuffers)]
    return dict(views[-1].buffers) if views else {}, made.findings


GOOD = (MOVING, CONSERVED)


def test_a_bias_that_stays_and_counts_that_grow_are_a_warning():
    buffers, findings = neglected(GOOD, GOOD, GOOD, (SAME, GROWING))
    assert buffers == {"b.bias": Neglect.UPDATED, "b.counts": Neglect.RESET}
    (finding,) = findings
    assert (finding.code, finding.severity) == ("SHD025", "warning")
    assert finding.subjects == ("b.bias", "b.counts")
    assert "b.bias is not updated, b.counts is not reset in Net" in finding.message
    assert finding.message.endswith("at steps 0, 1, 2")


def test_a_bias_that_comes_back_to_the_same_numbers_is_updated_all_the_same():
    good = ((0.5, 0.6, 0.6, 0.5, 0.7, 0.8), CONSERVED * 2)
    odd = ((0.5,) * 6, (*GROWING, 32.0, 40.0, 48.0))
    buffers, _ = neglected(good, good, good, odd)
    assert buffers == {"b.bias": Neglect.UPDATED, "b.counts": Neglect.RESET}


def test_counts_that_others_set_back_before_the_step_are_reported():
    before = (MOVING, (0, 0, 0))
    buffers, _ = neglected(before, before, before, (MOVING, GROWING))
    assert buffers == {"b.counts": Neglect.RESET}


def test_a_bias_that_differs_on_one_module_alone_is_reported():
    def apart(rank):
        return (0.5, 0.6 + rank, 0.7 + rank)

    buffers, _ = neglected(GOOD, GOOD, GOOD, (apart, CONSERVED))
    assert buffers == {"b.bias": Neglect.REDUCED}


@pytest.mark.parametrize(
    "lives",
    [
        (GOOD, GOOD, GOOD, GOOD),
        (GOOD, GOOD, GOOD, (SAME, (0, 0, 0))),  # not in use
        (GOOD, GOOD, (SAME, GROWING), (SAME, GROWING)),  # a half
        (GOOD, (SAME, GROWING), (SAME, GROWING), (SAME, GROWING)),  # one is special
        (GOOD, GOOD, GOOD, ((0.5, 0.5, 0.6), CONSERVED)),  # now and then
    ],
)
def test_modules_that_may_be_meant_so_are_silent(lives):
    assert neglected(*lives) == ({}, ())


@pytest.mark.parametrize("last", [{"shape": (6,)}, {"requires_grad": False}])
def test_modules_that_are_not_alike_are_not_compared(last):
    assert neglected(GOOD, GOOD, GOOD, (SAME, GROWING), **last) == ({}, ())


def test_too_few_steps_and_probes_that_broke_are_reported():
    assert (
        aligned(WriteAligner).why(NeglectedBuffers)
        == "no model took three steps that were looked at"
    )
    made = aligned(WriteAligner, broken(1, "models"))
    assert isinstance(made.gaps[NeglectedBuffers], NotObserved)
