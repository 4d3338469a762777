import pytest

from distdiag.checks.shd.unsharded_parameter import UnshardedParameter
from distdiag.events.models import ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import mesh, model, plan
from tests.checks.verdicts import findings

PAIR = (0, 1)


def shard(name="blocks.0.weight", **changes):
    values = {
        "wrapper": "FSDP2",
        "placements": ("S(0)",),
        "mesh": mesh(2),
        "evidence": ReplicaEvidence.MESH,
    }
    return plan(name, **{**values, **changes})


def whole(name="head.weight", **changes):
    return plan(
        name, **{"wrapper": "", "replicas": PAIR, "evidence": ReplicaEvidence.MODEL, **changes}
    )


def blocks(number, units=None, **changes):
    return [
        shard(f"blocks.{n}.weight", unit=f"blocks.{n}" if units else "", **changes)
        for n in range(number)
    ]


def test_a_parameter_outside_all_units_is_noted_at_the_first_use():
    plans = [shard(unit="blocks.0"), whole(), whole("head.bias")]
    (finding,) = findings(UnshardedParameter, model(plans, plans))
    assert (finding.ranks, finding.subjects) == (RankSet(PAIR), ("head.weight", "head.bias"))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "head.weight and 1 more of FSDP2 Net belong to no module" in finding.message
    assert finding.location.line == 10


@pytest.mark.parametrize(
    "other",
    [
        whole(requires_grad=False),
        whole(is_parameter=False),
        whole(is_late=True),
        whole(evidence=ReplicaEvidence.WRAPPER, replicas=()),
        whole(evidence=ReplicaEvidence.REDUCED),
        whole(wrapper="DDP", evidence=ReplicaEvidence.WRAPPER),
        shard("head.weight", wrapper=""),
    ],
    ids=["frozen", "buffer", "late", "ignored", "reduced-by-hand", "ddp", "tensor-parallel"],
)
def test_what_is_outside_for_a_reason_is_silent(other):
    plans = [shard(unit="blocks.0"), other]
    assert not findings(UnshardedParameter, model(plans, plans))


def test_a_model_that_fsdp2_does_not_shard_is_silent():
    plans = [shard(wrapper=""), whole()]
    assert not findings(UnshardedParameter, model(plans, plans))


def test_a_large_model_of_blocks_in_one_unit_is_noted():
    plans = blocks(4, shape=(1024, 1024))
    (finding,) = findings(UnshardedParameter, model(plans, plans))
    assert finding.grade is Grade.NOTE
    assert "is one unit" in finding.message


@pytest.mark.parametrize(
    "plans",
    [
        blocks(4),
        blocks(3, shape=(1024, 1024)),
        blocks(4, units=True, shape=(1024, 1024)),
        [*blocks(4, units=True, shape=(1024, 1024)), shard("embed.weight", shape=(1024, 1024))],
    ],
    ids=["small", "few-blocks", "units", "units-and-root"],
)
def test_other_ways_to_divide_a_model_are_silent(plans):
    assert not findings(UnshardedParameter, model(plans, plans))
