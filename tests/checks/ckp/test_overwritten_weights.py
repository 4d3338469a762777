"""What ranks give to one distributed checkpoint as plain tensors."""

import pytest

from distdiag.checks.ckp.overwritten_weights import OverwrittenWeights, SavedWeightsView
from distdiag.engine.models.saves import SavedWeightsAligner
from distdiag.events.checkpoints import SavedWeight, WeightsSaved
from distdiag.events.models import ReplicaEvidence
from distdiag.events.ranks import RankSet
from tests.checks.models import plan, plan_event, state_event
from tests.checks.streams import event_of, plain_site
from tests.engine.aligned import aligned, broken

NAME = "experts.0.weight"


def started(*held, model="Net", **values):
    """Ranks begin with a parameter that holds these values."""
    plans = [plan(NAME, **values)]
    return [
        event
        for rank, value in enumerate(held)
        for event in (plan_event(rank, plans, name=model), state_event(rank, [value], name=model))
    ]


def saved(*digests, key=f"model.{NAME}", model="Net", checkpoint="/state"):
    name = NAME if model else ""
    return [
        event_of(
            WeightsSaved,
            rank,
            number=1,
            members=tuple(range(len(digests))),
            checkpoint=f"{checkpoint}{rank}" if checkpoint == "own" else checkpoint,
            weights=(SavedWeight(key, (4, 4), digest, model, name),),
            site=plain_site(30),
        )
        for rank, digest in enumerate(digests)
    ]


def found(*events):
    return aligned(SavedWeightsAligner, *events, checks=[OverwrittenWeights()]).findings


def test_parameters_that_ranks_have_for_themselves_under_one_key_are_an_error():
    (finding,) = found(*started(0.1, 0.2), *saved("c1", "c2"))
    assert (finding.code, finding.severity, finding.ranks) == ("CKP008", "error", RankSet([0, 1]))
    assert finding.subjects == (f"model.{NAME}",)
    assert finding.message.startswith("ranks 0-1 save different weights as model.experts.0.weight")
    assert finding.evidence[0].summary.endswith("these ranks began with different values of it")


def test_parameters_that_are_declared_so_may_begin_alike():
    own = {"is_ignored": True, "evidence": ReplicaEvidence.WORLD}
    (finding,) = found(*started(0.1, 0.1, **own), *saved("c1", "c2"))
    assert finding.evidence[0].summary.endswith("the program says that each rank has its own")


def test_a_copy_is_known_by_the_end_of_its_key():
    copies = saved("c1", "c2", model="")
    assert len(found(*started(0.1, 0.2), *copies)) == 1
    # Of which model it is a copy is not known.
    assert not found(*started(0.1, 0.2), *started(0.1, 0.1, model="Other"), *copies)


@pytest.mark.parametrize(
    ("events"),
    [
        [*started(0.1, 0.1), *saved("c1", "c2")],  # copies that meet at times
        [*started(0.1, 0.2), *saved("c1", "c1")],  # what was the same at last
        [*started(0.1, 0.2), *saved("c1", "c2", checkpoint="own")],
        [*started(0.1, 0.2), *saved("c1", "c2", key="other", model="")],
        [*started(0.1, 0.2, is_parameter=False), *saved("c1", "c2")],
        saved("c1", "c2"),
    ],
)
def test_what_may_be_meant_is_silent(events):
    assert not found(*events)


def test_models_that_begin_after_the_save_are_no_candidates():
    late = started(0.1, 0.1, model="Late")
    save = saved("c1", "c2", model="")
    events = [*started(0.1, 0.2), save[0], *late[:2], save[1], *late[2:]]
    assert len(found(*events)) == 1


def test_gaps_are_reported():
    assert "no weights were given" in aligned(SavedWeightsAligner).why(SavedWeightsView)
    assert "not observed" in aligned(SavedWeightsAligner, broken(0, "rank-states")).why(
        SavedWeightsView
    )
