import pytest

from distdiag.checks.rep.rng_mismatch import RngMismatch
from distdiag.events.collectives import GroupCreated
from distdiag.events.models import Moment
from distdiag.events.random import GeneratorState, RandomDraw, RandomState
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.feeds import mask, model_fed, related
from tests.checks.streams import event_of, plain_site, together
from tests.checks.verdicts import findings

PAIR = (0, 1)


def draw(rank, digest, *, replicas=PAIR, members=PAIR):
    return event_of(
        RandomDraw,
        rank,
        step=1,
        number=0,
        members=members,
        replicas=replicas,
        digest=digest,
        site=plain_site(50 + rank),
    )


def state(rank, moment=Moment.STEP, **digests):
    return event_of(
        RandomState,
        rank,
        step=1,
        moment=moment,
        generators=tuple(GeneratorState(name, each) for name, each in digests.items()),
        members=PAIR,
        site=plain_site(60 + rank),
    )


def test_copies_that_are_drawn_from_different_states_are_a_warning():
    (finding,) = findings(RngMismatch, together(draw(0, "a"), draw(1, "b")))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert (finding.ranks, finding.location.line) == (RankSet(PAIR), 50)
    assert "ranks 0-1 draw random numbers for copies of a DTensor" in finding.message


def test_parts_that_are_drawn_from_different_states_are_a_note():
    view = together(draw(0, "a", replicas=(0,)), draw(1, "b", replicas=(1,)))
    (finding,) = findings(RngMismatch, view)
    assert (finding.severity, finding.grade) == (Severity.INFO, Grade.NOTE)


def test_only_copies_that_differ_are_named_on_a_mesh_of_two_axes():
    four = (0, 1, 2, 3)
    digests, replicas = ("a", "a", "b", "c"), ((0, 1), (0, 1), (2, 3), (2, 3))
    draws = [
        draw(rank, digest, replicas=those, members=four)
        for rank, digest, those in zip(four, digests, replicas, strict=True)
    ]
    (finding,) = findings(RngMismatch, together(*draws))
    assert finding.ranks == RankSet([2, 3])


def test_tensor_parallel_ranks_with_dropout_whose_generators_differ_are_a_note():
    (finding,) = findings(RngMismatch, together(state(0, cpu="a"), state(1, cpu="b")))
    assert (finding.severity, finding.grade) == (Severity.INFO, Grade.NOTE)
    assert "their cpu generators are in different states" in finding.message


@pytest.mark.parametrize(
    "events",
    [
        (draw(0, "a"), draw(1, "a")),
        (state(0, cpu="a"), state(1, cpu="a")),
        (state(0, cpu="a", python="x"), state(1, cpu="a", python="y")),
        (state(0, cpu="a", cuda="c"), state(1, cpu="b", cuda="c")),
        (state(0, Moment.START, cpu="a"), state(1, Moment.START, cpu="b")),
    ],
    ids=["draws", "states", "python-only", "cpu-beside-cuda", "seeded-later"],
)
def test_generators_that_agree_where_they_must_are_silent(events):
    assert not findings(RngMismatch, together(*events))


# Masks that ranks draw which hold shards of one model

FIRST, SECOND = mask("s0", "whole"), mask("s1", "whole")


def of_masks(*draws):
    """What two tensor-parallel ranks draw in the first of two passes."""
    group = {"api": "new_group", "ordinal": 1, "desc": "tp", "generation": 0, "scope": PAIR}
    groups = [
        event_of(GroupCreated, rank, ranks=PAIR, site=plain_site(3), **group) for rank in PAIR
    ]
    given = {"inputs": ("the same",), "members": ()}
    passes = [
        [model_fed(rank, 0, draws=(each,), **given) for rank, each in enumerate(draws)],
        [model_fed(rank, 1, **given) for rank in PAIR],
    ]
    return related(RngMismatch, *passes, before=groups)


def test_masks_for_one_activation_from_different_states_are_named_with_their_module():
    (finding,) = of_masks(FIRST, SECOND)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert (finding.subjects, finding.location.line) == (("DDP Net", "drop"), 31)
    assert "torch.dropout of [4, 8] in drop Dropout of DDP Net draws different" in finding.message


@pytest.mark.parametrize(
    "second",
    [FIRST, mask("s1", "a part"), mask("s1", "whole", module="other Dropout"), mask("s1", "")],
    ids=["one state", "parts", "another module", "unknown"],
)
def test_masks_that_are_equal_or_for_parts_are_silent(second):
    first = mask("s0", "") if not second.activation else FIRST
    assert not of_masks(first, second)
