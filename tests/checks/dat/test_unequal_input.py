import pytest

from distdiag.checks.dat.unequal_input import UnequalInput
from distdiag.events.models import Mesh, ModelPlan, Moment, TensorPlan
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.feeds import model_fed, related
from tests.checks.streams import event_of, plain_site

WORLD = (0, 1, 2, 3)
MESH = Mesh(("dp", "tp"), (2, 2), WORLD)


def plan(rank, *, mesh=MESH, placements=("S(0)", "S(1)"), name="up.weight"):
    tensor = TensorPlan(name, (4, 4), "float32", mesh=mesh, placements=placements)
    fields = {"model": "Net", "moment": Moment.START, "first": 0, "total": 1}
    return event_of(ModelPlan, rank, tensors=(tensor,), site=plain_site(5), **fields)


def fed(number, batches, *, inputs=None, members=((0, 2), (1, 3)), **values):
    """What four ranks are given, of which 0 and 1, and 2 and 3, hold shards of one model."""
    return [
        model_fed(
            rank,
            number,
            members=members[rank % 2] if members else (),
            batch=batch and f"{batch} {number}",
            inputs=(f"{(inputs or batches)[rank]} {number}",),
            **values,
        )
        for rank, batch in enumerate(batches)
    ]


def judged(*passes, **of_plan):
    before = [plan(rank, **of_plan) for rank in WORLD]
    return related(UnequalInput, *passes, before=before, world=WORLD)


def test_ranks_that_hold_shards_and_get_batches_of_their_own_are_named():
    first, second = judged(*(fed(n, "abcd") for n in (0, 1)))
    assert {first.ranks, second.ranks} == {RankSet([0, 1]), RankSet([2, 3])}
    assert first.severity is Severity.WARNING
    assert "gets different batches on ranks" in first.message
    assert any("up.weight is sharded over them along tp" in e.summary for e in first.evidence)


def test_where_nobody_knows_the_batches_it_is_a_note():
    for finding in judged(*(fed(n, ("",) * 4, inputs="abcd") for n in (0, 1))):
        assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    ("passes", "of_plan"),
    [
        ([fed(n, "aabb") for n in (0, 1)], {}),
        ([fed(n, "aabb", inputs="abcd") for n in (0, 1)], {}),
        ([fed(0, "abcd")], {}),
        ([fed(0, "abcd"), fed(1, "aabb")], {}),
        ([fed(n, "abcd") for n in (0, 1)], {"placements": ("S(0)", "R")}),
        ([fed(n, "abcd") for n in (0, 1)], {"name": "moe.experts.0.up.weight"}),
        (
            [fed(n, "abcd", members=(WORLD, WORLD)) for n in (0, 1)],
            {"mesh": Mesh(("dp", "cp"), (2, 2), WORLD)},
        ),
        ([fed(n, "abcd", members=(WORLD, WORLD)) for n in (0, 1)], {}),
    ],
    ids=[
        "the same batch for all shards",
        "parts of one batch",
        "once only",
        "not always",
        "nothing is sharded along the axis",
        "experts",
        "another axis",
        "a wrapper keeps them together",
    ],
)
def test_right_programs_are_silent(passes, of_plan):
    assert not judged(*passes, **of_plan)
