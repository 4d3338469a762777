import pytest

from distdiag.checks.shd.placement_contradiction import PlacementContradiction
from distdiag.events.models import Mesh, ReplicaEvidence
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import plan
from tests.checks.plans import PAIR, fault, pattern, program, rules
from tests.checks.verdicts import findings

OVER_EP = {"experts.*": "Shard(0) over ep"}


def experts(*placements, names=("ep",), sizes=None, ranks=(0, 1), **values):
    """The weight of experts as a DTensor."""
    sizes = sizes or (2,) * len(names)
    mesh = Mesh(tuple(names), sizes, tuple(ranks))
    values.setdefault("shape", (4, 8, 8))
    return plan(
        "experts.w1", placements=placements, mesh=mesh, evidence=ReplicaEvidence.MESH, **values
    )


def contradictions(table, *plans, **values):
    return findings(PlacementContradiction, rules(table, *plans, **values))


@pytest.mark.parametrize("actual", ["R", "S(1)", "P(sum)"])
def test_another_placement_is_proven_and_named(actual):
    (finding,) = contradictions(OVER_EP, experts(actual))
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.PROVEN)
    assert (finding.subjects, finding.ranks) == (("experts.w1",), PAIR)
    assert f"says Shard(0) over ep, there is {actual} over ep" in finding.message


@pytest.mark.parametrize(
    ("rule", "held"),
    [
        ("Shard(0) over ep", experts("S(0)")),
        ("Shard(-3) over ep", experts("S(0)")),
        ("Replicate over *", experts("R")),
        ("Replicate over tp", experts("S(0)")),
        ("Shard(0) over tp", experts("_S(0, 2)", "S(0)", names=("dp", "tp"), ranks=range(4))),
        ("Shard(0) over dp", experts("_S(0, 2)", "S(0)", names=("dp", "tp"), ranks=range(4))),
        ("Shard(0) over ep, Replicate over *", experts("R", "S(0)", names=("dp", "ep"))),
    ],
)
def test_what_is_as_planned_is_silent(rule, held):
    assert not contradictions({"experts.*": rule}, held)


def test_a_tensor_that_is_split_where_it_should_be_replicated():
    (finding,) = contradictions({"experts.*": "Replicate over *"}, experts("S(0)"))
    assert finding.grade is Grade.PROVEN
    both = {"experts.*": "Shard(0) over ep, Replicate over *"}
    (finding,) = contradictions(both, experts("S(1)", "S(0)", names=("dp", "ep")))
    assert "there is S(1) over dp, S(0) over ep" in finding.message


def test_an_axis_that_the_mesh_lacks_cannot_split_once_the_mesh_has_all_ranks():
    (finding,) = contradictions(OVER_EP, experts("S(0)", names=("dp",)))
    assert finding.grade is Grade.PROVEN


@pytest.mark.parametrize(
    ("held", "world"),
    [
        (experts("S(1)", names=("shard",)), RankSet(range(4))),
        (experts("S(1)", names=("ep_fsdp",)), PAIR),
    ],
    ids=["ranks beside the mesh", "a name like it"],
)
def test_a_tensor_that_may_be_split_beyond_its_mesh_gets_a_note(held, world):
    (finding,) = contradictions(OVER_EP, held, world=world)
    assert finding.severity is Severity.INFO


def test_what_the_program_itself_splits_over_the_axis_is_silent():
    held = experts("S(1)", names=("shard",))
    assert not contradictions(OVER_EP, held, applied=(("experts.*", "ep"),))
    assert contradictions(OVER_EP, held, applied=(("experts.*", "tp"),))


def test_axes_without_names_are_compared_by_what_they_do():
    assert not contradictions(OVER_EP, experts("S(0)", names=("dim0",)))
    (finding,) = contradictions(OVER_EP, experts("S(1)", names=("dim0",)))
    assert finding.grade is Grade.LIKELY


def plain(evidence, replicas=(0, 1)):
    return plan("experts.w1", evidence=evidence, replicas=replicas)


def test_a_plain_tensor_that_is_whole_everywhere_is_likely_forgotten():
    (finding,) = contradictions(OVER_EP, plain(ReplicaEvidence.WRAPPER))
    assert finding.severity is Severity.ERROR
    assert "a plain tensor, no DTensor" in finding.message
    beside = plan(
        "w", placements=("R",), mesh=Mesh(("ep",), (2,), (0, 1)), evidence=ReplicaEvidence.MESH
    )
    (finding,) = contradictions(OVER_EP, plain(ReplicaEvidence.MODEL), beside)
    assert finding.grade is Grade.LIKELY


@pytest.mark.parametrize(
    ("held", "world"),
    [
        (plain(ReplicaEvidence.WORLD), PAIR),
        (plain(ReplicaEvidence.MARKED), PAIR),
        (plain(ReplicaEvidence.WRAPPER), RankSet(range(4))),
    ],
    ids=["nothing known", "marks", "ranks beside the wrapper's"],
)
def test_a_plain_tensor_that_may_be_a_part_gets_a_note(held, world):
    (finding,) = contradictions(OVER_EP, held, world=world)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    ("held", "world"),
    [
        (plain(ReplicaEvidence.WRAPPER, ()), PAIR),
        (plain(ReplicaEvidence.WRAPPER, (0,)), RankSet([0])),
        (plan("experts.count", is_parameter=False, replicas=(0, 1)), PAIR),
    ],
    ids=["a part", "one rank", "a buffer"],
)
def test_nothing_is_said_of_parts_of_lone_ranks_and_of_buffers(held, world):
    assert not contradictions(OVER_EP, held, world=world)


def test_what_two_rules_disagree_about_is_left_to_the_other_check():
    table = OVER_EP | {"*": "Replicate over ep"}
    assert not contradictions(table, experts("S(1)"))


def test_what_is_sure_and_what_is_not_stand_apart():
    sure, unsure = experts("R"), plan("experts.w2", evidence=ReplicaEvidence.WORLD, replicas=(0, 1))
    findings = contradictions(OVER_EP, sure, unsure, axes={})
    assert [(f.severity, f.subjects) for f in findings] == [
        (Severity.ERROR, ("experts.w1",)),
        (Severity.INFO, ("experts.w2",)),
    ]


def test_what_a_program_has_sharded_and_is_whole_again():
    broken = fault("unlike", text="but there is a plain tensor")
    (finding,) = findings(PlacementContradiction, program(pattern("up", faults=[broken])))
    assert (finding.severity, finding.grade) == (Severity.ERROR, Grade.LIKELY)
    assert finding.subjects == ("up",)
    assert "says ColwiseParallel, but there is a plain tensor" in finding.message
    assert not findings(PlacementContradiction, program(pattern("up", faults=[fault("clash")])))
