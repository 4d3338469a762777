import pytest

from distdiag.checks.dat.repeated_augmentation import RepeatedAugmentation
from distdiag.engine.augmentations import augmentations
from distdiag.events.data import Fetch, GeneratorUse
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import epoch_fed
from tests.checks.verdicts import findings


def fetch(batch, state, *, worker=0, number=1, **values):
    values = {"name": "numpy", "num_drawn": 8, "is_seeded": True, **values}
    use = GeneratorUse(before=f"{state} before", after=f"{state} after", **values)
    return Fetch(worker, number, batch, 4, (use,))


def judged(*fetches, are_together=True, **values):
    """The fetches of rank 0, rank 1, …"""
    by_rank = {r: epoch_fed(r, range(8), fetches=each, **values) for r, each in enumerate(fetches)}
    views = augmentations(by_rank, are_together=are_together)
    return [finding for view in views for finding in findings(RepeatedAugmentation, view)]


def test_workers_of_one_rank_that_draw_alike_are_named():
    own = [fetch("a", "s"), fetch("b", "s", worker=1)]
    (finding,) = judged(own, [fetch("c", "t"), fetch("d", "u", worker=1)])
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0]))
    assert "workers 0 and 1 of rank 0 draw the same numbers from numpy's" in finding.message
    assert finding.location.line == 10


def test_ranks_whose_workers_the_program_seeded_alike_are_named():
    (finding,) = judged([fetch("a", "s")], [fetch("b", "s")])
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))


@pytest.mark.parametrize(
    ("values", "doubt"),
    [
        ({"is_seeded": False}, "seeded alike"),
        ({"num_drawn": 3}, "for whole batches"),
        ({"num_drawn": -1}, "for whole batches"),
        ({"is_for_batch": True}, "for whole batches"),
        ({"number": 0}, "the first fetch alone"),
    ],
)
def test_what_may_be_meant_is_a_note(values, doubt):
    (finding,) = judged([fetch("a", "s", **values)], [fetch("b", "s", **values)])
    assert finding.severity is Severity.INFO
    assert doubt in finding.message


@pytest.mark.parametrize(
    "other",
    [
        fetch("a", "s"),
        fetch("b", "t"),
        fetch("b", "s", worker=1),
        fetch("b", "s", number=2),
        fetch("b", "s", name="python"),
    ],
    ids=["same-samples", "other-state", "other-worker", "later", "other-generator"],
)
def test_numbers_that_are_not_shared_are_silent(other):
    assert judged([fetch("a", "s")], [other]) == []


def test_ranks_of_other_models_and_evaluations_may_share_them():
    shared = [fetch("a", "s")], [fetch("b", "s")]
    assert judged(*shared, are_together=False) == []
    assert judged(*shared, is_trained=False) == []
