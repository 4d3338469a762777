from distdiag.checks.ckp.slice_saved_as_whole import SliceSavedAsWhole
from distdiag.engine.models.aligner import ModelAligner
from distdiag.events.checkpoints import WeightsSaved
from distdiag.events.models import Moment, ReplicaEvidence, SliceSaved
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import plan, plan_event, state_event
from tests.checks.streams import event_of, plain_site, together
from tests.checks.verdicts import findings
from tests.engine.aligned import aligned

NAMES = ("q.lora_A", "q.lora_B")


def saved(*ranks):
    """Of four ranks that hold parts, these have saved theirs."""
    made = [
        event_of(
            SliceSaved, rank, step=9, names=NAMES, members=(0, 1, 2, 3), site=plain_site(60 + rank)
        )
        for rank in ranks
    ]
    return findings(SliceSavedAsWhole, together(*made, expected=range(4)))


def test_the_ranks_whose_parts_are_lost_are_named():
    (finding,) = saved(0)
    assert (finding.ranks, finding.grade) == (RankSet([1, 2, 3]), Grade.PROVEN)
    assert (finding.severity, finding.subjects) == (Severity.ERROR, NAMES)
    assert (finding.step, finding.location.line) == (9, 60)
    assert finding.message == (
        "rank 0 saved only its own part of q.lora_A and 1 more; the parts of ranks 1-3 were "
        "never saved"
    )


def test_who_saved_is_evidence():
    (finding,) = saved(0, 2)
    assert [each.ranks for each in finding.evidence] == [RankSet([0, 2]), RankSet([1, 3])]


def own_saved(rank, name="expert.weight"):
    return event_of(
        SliceSaved, rank, names=(name,), members=(0, 1), site=plain_site(30), are_own=True
    )


def began(*held):
    """Two ranks begin with these values of what DDP leaves to each rank."""
    plans = [plan("expert.weight", wrapper="", is_ignored=True, evidence=ReplicaEvidence.WORLD)]
    plans.append(plan("trunk.weight", replicas=(0, 1)))
    return [
        event
        for rank, value in enumerate(held)
        for event in (plan_event(rank, plans), state_event(rank, [value, 0.5]))
    ]


def lost(*events):
    return aligned(ModelAligner, *events, checks=[SliceSavedAsWhole()]).findings


def test_own_parts_that_one_rank_alone_saves_are_an_error():
    (finding,) = lost(*began(0.1, 0.2), own_saved(0))
    assert (finding.code, finding.ranks, finding.subjects) == (
        "CKP002",
        RankSet([1]),
        ("expert.weight",),
    )


def stepped(*held):
    """The same two ranks, before the fourth step."""
    return [
        state_event(rank, [value, 0.5], moment=Moment.STEP, step=4)
        for rank, value in enumerate(held)
    ]


def test_own_parts_that_only_training_sets_apart_are_an_error():
    assert lost(*began(0.1, 0.1), *stepped(0.2, 0.3), own_saved(0))
    assert not lost(*began(0.1, 0.1), *stepped(0.2, 0.2), own_saved(0))


def test_own_parts_that_all_save_or_that_are_copies_are_silent():
    assert not lost(*began(0.1, 0.2), own_saved(0), own_saved(1))
    assert not lost(*began(0.1, 0.1), own_saved(0))
    elsewhere = event_of(
        WeightsSaved,
        1,
        number=1,
        members=(0, 1),
        checkpoint="/state",
        weights=(),
        site=plain_site(31),
    )
    assert not lost(*began(0.1, 0.2), own_saved(0), elsewhere)
